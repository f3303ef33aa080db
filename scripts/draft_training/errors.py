"""Errors of the draft trainer.

TrainDraftError
├── TextError      the conversations can't be used
├── TargetError    the target can't be used
└── StateError     an output or work directory holds something else
"""


class TrainDraftError(Exception):
    """Base of everything the trainer raises on purpose."""


class TextError(TrainDraftError):
    """The conversations can't be used."""


class TargetError(TrainDraftError):
    """The target can't be used."""


class StateError(TrainDraftError):
    """An output or work directory holds something else."""
