"""The tensors that say how one sequence is sampled: draft step and accept read the same ones.

Invariant: between rounds the penalty tables count exactly the committed tokens. The drafts of a
round are never written here, the graphs add them row by row, so nothing needs to be rolled back.
Where a request asks for no adjustment, every value is neutral and `adjust` is false.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sampling import SamplingParams

Array = NDArray[Any]

LEAST_TOP_P = 1e-30  # f32 has no smaller ones to count on, and 0 would keep no token


class SamplingInputs:
    """Arrays of one sequence, bound once; `begin` fills them for a request."""

    def __init__(self, vocab: int, rows: int) -> None:
        self._vocab = vocab
        self.shared: dict[str, Array] = {
            "temperature": np.zeros((1,), np.float32),
            "top_k": np.zeros((1,), np.int64),
            "top_p": np.ones((1,), np.float32),
            "min_p": np.zeros((1,), np.float32),
            "adjust": np.zeros((1,), np.bool_),
            "repetition_penalty": np.ones((1,), np.float32),
            "presence_penalty": np.zeros((1,), np.float32),
            "frequency_penalty": np.zeros((1,), np.float32),
            "logit_bias": np.zeros((1, vocab), np.float32),
            "seen_tokens": np.zeros((1, vocab), np.bool_),
            "output_counts": np.zeros((1, vocab), np.float32),
        }
        self.allowed = np.ones((1, rows, vocab), np.bool_)  # filled and reset by Constraint
        self._counting = False

    def begin(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        """Set everything for a new request; nothing of an earlier one is left."""
        shared = self.shared
        if shared["adjust"][0]:
            self._neutralise()
        shared["temperature"][0] = params.temperature
        shared["top_k"][0] = min(params.top_k, self._vocab)
        shared["top_p"][0] = max(params.top_p, LEAST_TOP_P)
        shared["min_p"][0] = params.min_p
        self._counting = params.penalised
        shared["adjust"][0] = params.penalised or params.masked or bool(params.logit_bias)
        for token, bias in params.logit_bias.items():
            shared["logit_bias"][0, token] = bias
        if self._counting:
            shared["repetition_penalty"][0] = params.repetition_penalty
            shared["presence_penalty"][0] = params.presence_penalty
            shared["frequency_penalty"][0] = params.frequency_penalty
            shared["seen_tokens"][0, np.asarray(prompt, np.int64)] = True

    def commit(self, tokens: Iterable[int]) -> None:
        """Count the tokens that a round committed."""
        if not self._counting:
            return
        for token in tokens:
            self.shared["seen_tokens"][0, token] = True
            self.shared["output_counts"][0, token] += 1

    def _neutralise(self) -> None:
        shared = self.shared
        shared["repetition_penalty"][0] = 1
        for name in ("presence_penalty", "frequency_penalty"):
            shared[name][0] = 0
        for name in ("logit_bias", "seen_tokens", "output_counts"):
            shared[name].fill(0)
