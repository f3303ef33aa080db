"""The parts of ``scripts/train_draft.py``: distil a small draft from text the target wrote.

The order of the modules is the order of the work: ``text`` reads and splits the conversations,
``target`` loads the model that is to be imitated, ``labels`` stores what it predicts, ``student``
builds the draft, ``training`` fits it, ``evaluate`` measures it on held-out text and ``export``
writes the directory which Outrider loads.
"""
