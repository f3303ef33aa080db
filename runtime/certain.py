"""Drafts that were certain, each with a q that is one-hot: nothing of `draft_probs` is needed."""

from __future__ import annotations

from collections.abc import Iterable

from .buffers import RoundBuffers
from .constraint import Constraint


def write_certain(tokens: Iterable[int], buffers: RoundBuffers, constraint: Constraint) -> int:
    """Up to the first that may not follow; returns how many."""
    count = 0
    for token in tokens:
        if not constraint.open_row(count) or not constraint.drafted(token):
            break
        buffers.block[0, 2 + count] = token
        count += 1
    return count
