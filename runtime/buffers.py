"""The memory that the three steps of a round share, so that no token is copied between them.

A draft step writes its token where the next step, verify and accept read it, and its row of q
where accept reads it. One sequence: the leading axis is batch = 1, so that every prefix of a buffer
is contiguous and can be bound by address.

    block    token before the last │ last committed │ draft 1 │ … │ draft k
    verify                          └──────── k + 1 query rows ────────┘
    accept                                           └──── k drafts ───┘

The drafts may be a tree: then they stand level by level, or in any order that puts a parent first,
and up to `max_nodes` of them. A chain's buffers are the first ones of the same arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sampling_inputs import SamplingInputs
from .tree import Tree
from .tree_buffers import TreeBuffers
from .uniforms import ACCEPT, DRAFT, DRAW, accept_purpose

Array = NDArray[Any]


class RoundBuffers:
    """Buffers for rounds of up to `max_draft_tokens` drafts in a chain, `max_nodes` in a tree."""

    def __init__(
        self, max_draft_tokens: int, vocab: int, draft_vocab: int, max_nodes: int = 0
    ) -> None:
        k = max_draft_tokens
        nodes = max(1, k, max_nodes)  # room for the draft that is none (`no_draft`)
        self.max_draft_tokens = k
        self.max_nodes = nodes
        self.block = np.zeros((1, nodes + 2), np.int64)
        self.logits = np.zeros((1, nodes + 1, vocab), np.float32)
        self.draft_probs = np.zeros((1, max(k, min(1, nodes)), draft_vocab), np.float32)
        self.q_rows = np.full((1, nodes), -1, np.int64)
        self.draft_uniforms = np.zeros((k,), np.float32)
        self.accept_uniforms = np.zeros((1, nodes), np.float32)
        self.draw_uniforms = np.zeros((1, nodes + 1), np.float32)
        self.chains = [TreeBuffers.of(Tree.chain(length)) for length in range(k + 1)]
        self._trees: dict[int, TreeBuffers] = {}
        self.target_lengths = np.zeros((1,), np.int32)  # rows of the target cache that are valid
        self.draft_lengths = np.zeros((1,), np.int32)
        self.num_accepted = np.zeros((1,), np.int64)
        self.next_token = np.zeros((1,), np.int64)
        self.new_lengths = np.zeros((1,), np.int32)
        self.last_row = np.zeros((1,), np.int64)
        self.sampling = SamplingInputs(vocab, nodes + 1)

    def set_uniforms(self, table: Array, position: int, k: int) -> None:
        """Take from `table` [purpose, position] what decides the tokens at `position`, …, + k."""
        self.draft_uniforms[:k] = table[DRAFT, position : position + k]
        self.accept_uniforms[0, :k] = table[ACCEPT, position : position + k]
        self.draw_uniforms[0, : k + 1] = table[DRAW, position : position + k + 1]

    def set_tree(self, tree: Tree, table: Array, position: int) -> None:
        """The shape of a round's drafts, and from `table` what decides the tokens behind each row.

        Siblings are tested one after the other, so each rank has numbers of its own; cousins share
        them, since of two rows at one depth at most one is reached.
        """
        self.tree(tree.size).set(tree)
        for i, rank in enumerate(tree.ranks):
            self.accept_uniforms[0, i] = table[
                accept_purpose(rank), position + tree.depths[i + 1] - 1
            ]
        for row, depth in enumerate(tree.depths):
            self.draw_uniforms[0, row] = table[DRAW, position + depth]

    def tree(self, size: int) -> TreeBuffers:
        """What calls over trees of so many drafts are bound to."""
        if size not in self._trees:
            self._trees[size] = TreeBuffers.of(Tree.chain(size))
        return self._trees[size]

    def set_drawn(self, k: int) -> None:
        """The chain's drafts were drawn, each from its row of draft_probs."""
        self.q_rows[0, :k] = np.arange(k)

    def set_certain(self, k: int) -> None:
        """The drafts were certain: no row of draft_probs is read."""
        self.q_rows[0, :k] = -1

    def set_last(self, tokens: Sequence[int]) -> None:
        """Put the last two committed tokens before the drafts; a lone one fills both places."""
        self.block[0, 0] = tokens[-2] if len(tokens) > 1 else tokens[-1]
        self.block[0, 1] = tokens[-1]

    def drafts(self, k: int) -> Array:
        return self.block[:, 2 : 2 + k]

    def query(self, rows: int) -> Array:
        return self.block[:, 1 : 1 + rows]
