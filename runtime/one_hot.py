"""Drafts that were certain: a row of q with all its mass on the token.

Invariant: of `draft_probs` only the cells of the last proposal, `_hot`, differ from zero.
"""

from __future__ import annotations

from collections.abc import Iterable

from .buffers import RoundBuffers
from .constraint import Constraint


class OneHotDrafts:
    """Writes tokens and their rows of q, cell by cell: a whole row is as long as the vocabulary."""

    def __init__(self, buffers: RoundBuffers) -> None:
        self._buffers = buffers
        self._hot: list[int] = []  # the token of each row of q

    def write(self, tokens: Iterable[int], constraint: Constraint) -> int:
        """In place of the last ones, up to the first that may not follow; returns how many."""
        self._clear()
        for token in tokens:
            if not constraint.open_row(len(self._hot)) or not constraint.drafted(token):
                break
            self._set(token)
        return len(self._hot)

    def _set(self, token: int) -> None:
        row = len(self._hot)
        self._buffers.block[0, 2 + row] = token
        self._buffers.draft_probs[0, row, token] = 1.0
        self._hot.append(token)

    def _clear(self) -> None:
        for row, token in enumerate(self._hot):
            self._buffers.draft_probs[0, row, token] = 0.0
        self._hot.clear()
