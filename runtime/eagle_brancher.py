"""An EAGLE head for trees: a row pairs its token with the state that the head gave its parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .branch_calls import BranchCalls
from .contract import MOST_TREE_NODES
from .eagle_drafter import EagleDrafter
from .executor import Buffers, Executor
from .tree_shape import DraftTree, Ranked

Array = NDArray[Any]


class EagleBrancher:
    """The branch graph over the cache of the head that drafts chains."""

    def __init__(self, graph: Executor, head: EagleDrafter) -> None:
        self._head = head
        self._fed: dict[int, Array] = {}  # states that a call of so many rows reads
        self._given: dict[int, Array] = {}  # and gives, of the rows that it ranks
        self._width = head.state_width
        self._states: dict[int, Array] = {}  # row of the tree → the state that it was given
        lengths = head.window.lengths
        self._calls = BranchCalls(graph, lengths, head.caches, head.present, self._extra)

    @property
    def most_levels(self) -> int:
        return MOST_TREE_NODES

    def start(self, tokens: Sequence[int], rows: int) -> Ranked | None:
        pairs = len(tokens) - 1
        if pairs < 1:  # one token has no pair
            return None
        window = self._head.window
        window.make_room(pairs, rows + 1)
        if window.end >= pairs:  # read before: its candidates are forgotten
            window.rows -= window.end - pairs + 1
        unread = tokens[window.end + 1 :]
        states, seconds = self._head.states(window.end, len(unread))
        self._state(self._fed, len(unread))[:] = states
        found = self._calls.read(unread)
        self._states = {0: self._state(self._given, 1)[0, 0].copy()}
        return Ranked(tokens=found.tokens, probs=found.probs, seconds=seconds + found.seconds)

    def grow(self, rows: Sequence[int], draft: DraftTree) -> Ranked:
        fed = self._state(self._fed, len(rows))
        for i, row in enumerate(rows):
            fed[0, i] = self._states[draft.parents[row - 1]]
        found = self._calls.grow(rows, draft)
        given = self._state(self._given, len(rows))
        for i, row in enumerate(rows):
            self._states[row] = given[0, i].copy()
        return found

    def stop(self) -> None:
        self._calls.stop()
        self._states = {}

    def _extra(self, rows: int, ranked: int) -> tuple[Buffers, Buffers]:
        return (
            {"states": self._state(self._fed, rows)},
            {"next_state": self._state(self._given, ranked)},
        )

    def _state(self, buffers: dict[int, Array], rows: int) -> Array:
        if rows not in buffers:
            buffers[rows] = np.zeros((1, rows, self._width), np.float32)
        return buffers[rows]
