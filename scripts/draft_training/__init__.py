"""The parts of ``scripts/train_draft.py``: distil a small drafter from text the target wrote.

The order of the modules is the order of the work: ``text`` reads and splits the conversations,
``target`` loads the model that is to be imitated, ``job`` checks a run's inputs, ``labels`` stores
what the target predicts and ``features`` the states that heads read, ``training`` fits a drafter,
``evaluate`` and ``chain_figures`` measure it on held-out text, ``export`` and ``export_heads``
write the directory which Outrider loads, and ``recipes`` puts these together for each kind.

The drafters are ``student``, a model of some of the target's own layers; ``eagle``, a head that
begins as the linear one of ``start`` and is fitted on ``chains``; and the heads of ``medusa``.
``pairs`` says what the heads learn from which position.
"""
