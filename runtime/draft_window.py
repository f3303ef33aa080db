"""Which stretch of the committed text the rows of a draft's cache stand for.

Invariant: row i of the cache belongs to position `base` + i, and the first `rows` rows are valid.
A draft that is far behind, or at its cache's end, starts anew a window before the text's end: any q
is exact as long as it is what was sampled from, and reading a long prompt for a few drafts doesn't
pay.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

WINDOW = 128  # most positions that are read to catch up, in one call


class DraftWindow:
    """`lengths` [1] int32 is the tensor that the graph reads its valid rows from."""

    def __init__(self, lengths: NDArray[Any], max_context: int) -> None:
        self.lengths = lengths
        self._max_context = max_context
        self.size = min(WINDOW, max_context // 2)
        self.base = 0

    @property
    def end(self) -> int:
        """The first position that was not read."""
        return self.base + self.rows

    @property
    def rows(self) -> int:
        return int(self.lengths[0])

    @rows.setter
    def rows(self, rows: int) -> None:
        self.lengths[0] = rows

    @property
    def most_drafts(self) -> int:
        """Behind a full window k drafts write k - 1 more rows."""
        return self._max_context - self.size + 1

    def holds(self, end: int, drafts: int) -> bool:
        """Whether there is a row for every position up to `end` and for so many drafts."""
        return end - self.base + drafts <= self._max_context

    def rollback(self, end: int) -> None:
        """Keep what was read of the positions before `end`."""
        if end < self.base:
            self._restart(0)
        elif end < self.end:
            self.rows = end - self.base

    def make_room(self, end: int, drafts: int) -> None:
        """Before the positions up to `end` are read and this many drafts made behind them."""
        far_behind = end - self.end > self.size
        full = end - self.base + drafts - 1 > self._max_context
        if far_behind or full:
            self._restart(max(0, end - self.size))

    def _restart(self, base: int) -> None:
        self.base = base
        self.rows = 0
