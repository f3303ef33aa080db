"""The calls of a draft's branch graph: rows of a growing tree behind a cache in, candidates out.

Invariant: `rows` of the cache are of committed tokens; those of the tree stand behind them, in the
order in which they were grown, and are forgotten when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contract import BRANCH_WIDTH
from .executor import Buffers, Call, Executor
from .tree_shape import DraftTree, Ranked

Array = NDArray[Any]
MoreInputs = Callable[[int], Buffers]  # of so many query rows


@dataclass(frozen=True, kw_only=True)
class _Bound:
    call: Call
    input_ids: Array  # [1, rows]
    depths: Array  # [1, columns]
    visible: Array  # [1, rows, columns]
    top_tokens: Array  # [1, logits, width]
    top_probs: Array


class BranchCalls:
    """Bound when first asked for, by (rows, columns, rows that are ranked)."""

    def __init__(
        self,
        graph: Executor,
        lengths: Array,  # [1] i32, the graph's past_lengths
        caches: Buffers,
        present: Buffers,
        extra: Callable[[int, int], tuple[Buffers, Buffers]] = lambda rows, ranked: ({}, {}),
    ) -> None:
        """extra: further inputs and outputs of a call over `rows` that ranks `ranked`."""
        self._graph = graph
        self._lengths = lengths
        self._caches, self._present = caches, present
        self._extra = extra
        self._calls: dict[tuple[int, int, int], _Bound] = {}
        self._grown: list[int] = []  # rows of the tree, in the order of the cache

    @property
    def rows(self) -> int:
        return int(self._lengths[0])

    @rows.setter
    def rows(self, rows: int) -> None:
        self._lengths[0] = rows

    def read(self, tokens: Sequence[int]) -> Ranked:
        """A chain of committed tokens behind `rows`; what may follow the last."""
        count = len(tokens)
        bound = self._bound(count, count, 1)
        bound.input_ids[0] = tokens
        bound.depths[0] = np.arange(count)
        bound.visible[0] = np.tri(count, dtype=np.bool_)
        seconds = bound.call.run()
        self.rows += count
        self._grown = []
        return Ranked(tokens=bound.top_tokens[0], probs=bound.top_probs[0], seconds=seconds)

    def grow(self, rows: Sequence[int], draft: DraftTree) -> Ranked:
        """What may follow these rows of the tree, each behind its ancestors alone."""
        grown = [*self._grown, *rows]
        columns = {row: i for i, row in enumerate(grown)}
        bound = self._bound(len(rows), len(grown), len(rows))
        bound.visible[0] = False
        for i, row in enumerate(rows):
            bound.input_ids[0, i] = draft.tokens[row - 1]
            at, depth = row, 0
            while at:
                bound.visible[0, i, columns[at]] = True
                at, depth = draft.parents[at - 1], depth + 1
            bound.depths[0, columns[row]] = depth - 1
        for row, column in columns.items():
            if row not in rows:
                bound.depths[0, column] = _depth(draft, row) - 1
        seconds = bound.call.run()
        self.rows += len(rows)
        self._grown = grown
        return Ranked(
            tokens=bound.top_tokens[0].copy(), probs=bound.top_probs[0].copy(), seconds=seconds
        )

    def stop(self) -> None:
        """Forget the tree."""
        self.rows -= len(self._grown)
        self._grown = []

    def _bound(self, rows: int, columns: int, ranked: int) -> _Bound:
        key = (rows, columns, ranked)
        if key not in self._calls:
            self._calls[key] = self._bind(*key)
        return self._calls[key]

    def _bind(self, rows: int, columns: int, ranked: int) -> _Bound:
        more_inputs, more_outputs = self._extra(rows, ranked)
        arrays: dict[str, Array] = {
            "input_ids": np.zeros((1, rows), np.int64),
            "depths": np.zeros((1, columns), np.int64),
            "visible": np.zeros((1, rows, columns), np.bool_),
        }
        tops: dict[str, Array] = {
            "top_tokens": np.zeros((1, ranked, BRANCH_WIDTH), np.int64),
            "top_probs": np.zeros((1, ranked, BRANCH_WIDTH), np.float32),
        }
        inputs = {
            **arrays,
            "past_lengths": self._lengths,
            "num_logits": np.array(ranked, np.int64),
            **more_inputs,
            **self._caches,
        }
        call = self._graph.bind(inputs, {**tops, **more_outputs, **self._present})
        return _Bound(call=call, **arrays, **tops)


def _depth(draft: DraftTree, row: int) -> int:
    depth = 0
    while row:
        row, depth = draft.parents[row - 1], depth + 1
    return depth
