"""The target's hidden states at the rows that it has read, for drafters that start from them.

Invariant: row i is what the target computed at row i of its cache, whenever that was; rows from the
target's length on are never read. Rollback is the target's smaller length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class FeatureStore:
    """One buffer that the target's calls write, and every row of it that still counts."""

    def __init__(self, width: int, max_context: int, most_rows: int) -> None:
        self._rows = np.zeros((max_context, width), np.float32)
        self._output = np.zeros((1, most_rows, width), np.float32)

    @property
    def width(self) -> int:
        return int(self._rows.shape[1])

    def output(self, rows: int) -> Array:
        """What a call over this many query rows is bound to: [1, rows, width]."""
        return self._output[:, :rows]

    def keep(self, start: int, rows: int) -> None:
        """A call has written its output, for cache rows `start` …; keep what fits the context."""
        self.put(start, self.output(rows))

    def keep_rows(self, start: int, rows: Sequence[int]) -> None:
        """The same for some of the rows of a tree, which follow one another."""
        self._rows[start : start + len(rows)] = self._output[0, list(rows)]

    def put(self, start: int, rows: Array) -> None:
        """Rows [1, n, width] that another call than ours gave, for cache rows `start` …"""
        end = min(start + rows.shape[1], len(self._rows))
        self._rows[start:end] = rows[0, : end - start]

    def copy(self, start: int, into: Array) -> None:
        """Rows `start` … into `into` [1, rows, width]."""
        into[0] = self._rows[start : start + into.shape[1]]
