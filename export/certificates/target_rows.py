"""The target alone, through plain rounds: what the certificates hold speculation against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.round import Rounds
from runtime.sampling import SamplingParams

from .world import Array

GREEDY = SamplingParams()


class TargetRows:
    """Plain rows over rounds that nobody else uses meanwhile."""

    def __init__(self, rounds: Rounds, max_context: int) -> None:
        self.rounds = rounds
        self.uniforms: NDArray[Any] = np.zeros((3, max_context + 1), np.float32)

    def behind(self, tokens: Sequence[int]) -> Array:
        """Logits [vocab] f32 of the next token behind a text."""
        self.rounds.begin(GREEDY, tokens)
        self.rounds.prefill(list(tokens), self.uniforms)
        row: Array = self.rounds.buffers.logits[0, 0].copy()
        return row
