"""The memory that the three steps of a round share, so that no token is copied between them.

A draft step writes its token where the next step, verify and accept read it, and its row of q
where accept reads it. One sequence: the leading axis is batch = 1, so that every prefix of a buffer
is contiguous and can be bound by address.

    block    token before the last │ last committed │ draft 1 │ … │ draft k
    verify                          └──────── k + 1 query rows ────────┘
    accept                                           └──── k drafts ───┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sampling_inputs import SamplingInputs
from .uniforms import ACCEPT, DRAFT, DRAW

Array = NDArray[Any]


class RoundBuffers:
    """Buffers for rounds of up to `max_draft_tokens` drafts."""

    def __init__(self, max_draft_tokens: int, vocab: int, draft_vocab: int) -> None:
        k = max_draft_tokens
        self.max_draft_tokens = k
        self.block = np.zeros((1, k + 2), np.int64)
        self.logits = np.zeros((1, k + 1, vocab), np.float32)
        self.draft_probs = np.zeros((1, k, draft_vocab), np.float32)
        self.draft_uniforms = np.zeros((k,), np.float32)
        self.accept_uniforms = np.zeros((1, k), np.float32)
        self.draw_uniforms = np.zeros((1, k + 1), np.float32)
        self.target_lengths = np.zeros((1,), np.int32)  # rows of the target cache that are valid
        self.draft_lengths = np.zeros((1,), np.int32)
        self.num_accepted = np.zeros((1,), np.int64)
        self.next_token = np.zeros((1,), np.int64)
        self.new_lengths = np.zeros((1,), np.int32)
        self.sampling = SamplingInputs(vocab, k + 1)

    def set_uniforms(self, table: Array, position: int, k: int) -> None:
        """Take from `table` [purpose, position] what decides the tokens at `position`, …, + k."""
        self.draft_uniforms[:k] = table[DRAFT, position : position + k]
        self.accept_uniforms[0, :k] = table[ACCEPT, position : position + k]
        self.draw_uniforms[0, : k + 1] = table[DRAW, position : position + k + 1]

    def set_last(self, tokens: Sequence[int]) -> None:
        """Put the last two committed tokens before the drafts; a lone one fills both places."""
        self.block[0, 0] = tokens[-2] if len(tokens) > 1 else tokens[-1]
        self.block[0, 1] = tokens[-1]

    def drafts(self, k: int) -> Array:
        return self.block[:, 2 : 2 + k]

    def query(self, rows: int) -> Array:
        return self.block[:, 1 : 1 + rows]
