"""What the graphs read of a tree, in memory that they can be bound to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .tree import Tree

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TreeBuffers:
    """Of one number of drafts k; `set` changes the tree and no address."""

    parents: Array  # [1, k] i64
    visible: Array  # [1, k + 1, k + 1] bool
    depths: Array  # [1, k + 1] i64

    @classmethod
    def of(cls, tree: Tree) -> Self:
        size = tree.size
        buffers = cls(
            parents=np.zeros((1, size), np.int64),
            visible=np.zeros((1, size + 1, size + 1), np.bool_),
            depths=np.zeros((1, size + 1), np.int64),
        )
        buffers.set(tree)
        return buffers

    def inputs(self) -> dict[str, Array]:
        """What a target that verifies trees is told; others ignore it."""
        return {"depths": self.depths, "visible": self.visible}

    def set(self, tree: Tree) -> None:
        self.parents[0] = tree.parents
        self.visible[0] = tree.visible
        self.depths[0] = tree.depths


@cache
def chain_inputs(rows: int) -> Mapping[str, Array]:
    """Of a call over a chain of query rows; the same for all and never written."""
    return MappingProxyType(TreeBuffers.of(Tree.chain(rows - 1)).inputs())
