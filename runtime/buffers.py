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

from .sampling import SamplingParams
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
        self.sampling: dict[str, Array] = {
            "temperature": np.zeros((1,), np.float32),
            "top_k": np.zeros((1,), np.int64),
            "top_p": np.ones((1,), np.float32),
            "min_p": np.zeros((1,), np.float32),
        }

    def set_sampling(self, params: SamplingParams) -> None:
        vocab = self.logits.shape[2]
        self.sampling["temperature"][0] = params.temperature
        self.sampling["top_k"][0] = min(params.top_k, vocab)
        self.sampling["top_p"][0] = params.top_p
        self.sampling["min_p"][0] = params.min_p

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
