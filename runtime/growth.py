"""How a static tree is grown and what moves where, as tables: the shape alone decides it.

The same tree, row for row, as `tree_shape.StaticTree.grown` makes of a drafter that always ranks
BRANCH_WIDTH tokens, which a draft model does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contract import BRANCH_WIDTH
from .tree import Tree
from .uniforms import accept_purpose

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Level:
    """One call of the draft over rows of the tree: those at one depth that have children."""

    rows: tuple[int, ...]
    first: int  # rows that earlier calls over the tree wrote
    picks: Array  # [1, rows] i64: their tokens, among all that was ranked
    depths: Array  # [1, first + rows] i64
    visible: Array  # [1, rows, first + rows] bool

    @property
    def ranked(self) -> slice:
        """Where what follows these rows goes; what follows the root comes first."""
        return slice(1 + self.first, 1 + self.first + len(self.rows))


@dataclass(frozen=True)
class Growth:
    """Of a tree whose rows stand level by level."""

    tree: Tree

    @property
    def reads(self) -> int:
        """Committed tokens that a round reads anew: as many as the one before may have committed.

        So every round has one form, however many of them the draft had read before.
        """
        return self.tree.depth + 1

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        found, grown = list[Level](), list[int]()
        for depth in range(1, self.tree.depth):
            rows = [row for row in self._expanded if self.tree.depths[row] == depth]
            first = len(grown)
            grown += rows
            found.append(
                Level(
                    rows=tuple(rows),
                    first=first,
                    picks=self._picks(rows),
                    depths=np.array([[self.tree.depths[row] - 1 for row in grown]], np.int64),
                    visible=self.tree.visible[np.ix_(rows, grown)][None],
                )
            )
        return tuple(found)

    @cached_property
    def picks(self) -> Array:
        """[1, drafts] i64: the token of every draft, among all that was ranked."""
        return self._picks(range(1, self.tree.size + 1))

    @property
    def ranked_rows(self) -> int:
        """The root, and every row with children."""
        return 1 + len(self._expanded)

    @cached_property
    def paths(self) -> Array:
        """[rows, depth] i64, as `tree_contract.PATHS`."""
        own = np.arange(1, self.tree.depth + 1)
        table = np.tile(own, (self.tree.size + 1, 1))
        for row in range(self.tree.size + 1):
            path = self.tree.path(row)
            table[row, : len(path)] = path
        return table

    @cached_property
    def purposes(self) -> Array:
        """[drafts]: of the uniform that each is put to the test with."""
        return np.array([accept_purpose(rank) for rank in self.tree.ranks])

    @cached_property
    def _expanded(self) -> tuple[int, ...]:
        return tuple(sorted({parent for parent in self.tree.parents if parent}))

    def _picks(self, rows: Any) -> Array:
        place = {row: i for i, row in enumerate((0, *self._expanded))}
        parents, ranks = self.tree.parents, self.tree.ranks
        at = [BRANCH_WIDTH * place[parents[row - 1]] + ranks[row - 1] for row in rows]
        return np.array([at], np.int64)
