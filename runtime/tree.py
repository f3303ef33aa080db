"""The shape of a round's drafts: which token each of them follows. A chain is the tree of width 1.

Row 0 is the last committed token, row i + 1 is draft i. Invariant: a row stands behind its parent,
so that the rows which a row sees (itself, its ancestors, row 0) are never behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRequest


@dataclass(frozen=True)
class Tree:
    """`parents[i]` is the row that draft i follows.

    Drafts behind one parent are its children in their order of rank, the likeliest first.
    Raises InvalidRequest for a draft in front of its parent.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for i, parent in enumerate(self.parents):
            if not 0 <= parent <= i:
                raise InvalidRequest(
                    f"tree: draft {i}: received parent row {parent}. Expected one from 0, the last "
                    f"committed token, to {i}, the draft before it."
                )

    @classmethod
    def chain(cls, length: int) -> Tree:
        return cls(tuple(range(length)))

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> Tree:
        """Every node at depth d has widths[d] children; level by level."""
        level, parents = [0], list[int]()
        for width in widths:
            first = len(parents) + 1
            parents += [row for row in level for _ in range(width)]
            level = list(range(first, len(parents) + 1))
        return cls(tuple(parents))

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[int]]) -> Tree:
        """Medusa's notation: each path names a node by the ranks on the way to it.

        Level by level. Raises InvalidRequest for a path twice, or one whose parent or whose sibling
        of the rank before isn't among them.
        """
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        rows: dict[tuple[int, ...], int] = {(): 0}
        parents: list[int] = []
        for path in ordered:
            before = () if not path else (*path[:-1], path[-1] - 1)
            known = path and path[:-1] in rows and (path[-1] == 0 or before in rows)
            if path in rows or not known:
                raise InvalidRequest(
                    f"tree: received path {list(path)}. Expected every path once, with its parent "
                    f"{list(path[:-1])} and, for a rank above 0, {list(before)} among the others."
                )
            rows[path] = len(parents) + 1
            parents.append(rows[path[:-1]])
        return cls(tuple(parents))

    @property
    def size(self) -> int:
        """Drafts."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of every row; the root's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of every draft among its siblings."""
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return tuple(ranks)

    @property
    def width(self) -> int:
        """Most children of one row."""
        return max(self.ranks, default=-1) + 1

    @cached_property
    def visible(self) -> NDArray[np.bool_]:
        """[rows, rows]: row i sees row j."""
        visible = np.eye(self.size + 1, dtype=np.bool_)
        for i, parent in enumerate(self.parents):
            visible[i + 1] |= visible[parent]
        return visible

    def path(self, row: int) -> list[int]:
        """The rows from the first draft to `row`, which may be the root: none."""
        rows = []
        while row:
            rows.append(row)
            row = self.parents[row - 1]
        return rows[::-1]

    def children(self) -> list[list[int]]:
        """For each row, the rows of its drafts in order."""
        children: list[list[int]] = [[] for _ in range(self.size + 1)]
        for i, parent in enumerate(self.parents):
            children[parent].append(i + 1)
        return children

    def without(self, rows: set[int]) -> tuple[Tree, list[int]]:
        """Without some drafts and all behind them; and the old rows of those that are left."""
        kept, new = [0], {0: 0}
        parents = []
        for i, parent in enumerate(self.parents):
            row = i + 1
            if row in rows or parent not in new:
                continue
            new[row] = len(kept)
            kept.append(row)
            parents.append(new[parent])
        return Tree(tuple(parents)), kept[1:]
