"""Medusa's heads for trees: head d ranks the drafts at depth d + 1, whatever stands before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contract import BRANCH_WIDTH
from .executor import Executor
from .medusa_drafter import MedusaDrafter
from .tree import Tree
from .tree_shape import DraftTree, Ranked

Array = NDArray[Any]


class MedusaBrancher:
    """Over the drafter's heads; one more call ranks what all of them say."""

    def __init__(self, drafter: MedusaDrafter, rank: Executor) -> None:
        self._drafter = drafter
        logits = drafter.logits
        self._tokens: Array = np.zeros((1, logits.shape[1], BRANCH_WIDTH), np.int64)
        self._probs: Array = np.zeros((1, logits.shape[1], BRANCH_WIDTH), np.float32)
        outputs = {"top_tokens": self._tokens, "top_probs": self._probs}
        self._rank = rank.bind({"logits": logits}, outputs)

    @property
    def most_levels(self) -> int:
        return int(self._tokens.shape[1])

    def start(self, tokens: Sequence[int], rows: int) -> Ranked | None:
        if len(tokens) < 2:  # the target has no state yet
            return None
        seconds = self._drafter.read(tokens) + self._rank.run()
        return self._ranked(0, 1, seconds)

    def grow(self, rows: Sequence[int], draft: DraftTree) -> Ranked:
        depth = Tree(tuple(draft.parents)).depths[rows[0]]
        return self._ranked(depth, len(rows), 0.0)

    def stop(self) -> None:
        return

    def _ranked(self, head: int, rows: int, seconds: float) -> Ranked:
        return Ranked(
            tokens=np.repeat(self._tokens[0, head : head + 1], rows, 0),
            probs=np.repeat(self._probs[0, head : head + 1], rows, 0),
            seconds=seconds,
        )
