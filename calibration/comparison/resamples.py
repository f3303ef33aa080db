"""Paired bootstrap over prompts: what another draw of prompts would have said.

Prompts are what was drawn at random; tokens of one prompt are not independent. A cell's figures,
all pairs and differences alike, use the same resamples, so a difference is that of one and the same
draw of prompts; and the interval of a − b is exactly the opposite of that of b − a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

RESAMPLES = 2000
LEVEL = 0.95
LEAST_PROMPTS = 4  # drawing again from fewer says too little about the next draw


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its 95 % bootstrap interval, None where too few prompts tell one."""

    value: float
    low: float | None
    high: float | None

    @property
    def is_chance(self) -> bool:
        """Whether 0 lies within, or nothing is known."""
        return self.low is None or self.high is None or self.low <= 0 <= self.high


class Resamples:
    """Weights of `count` prompts: row 0 takes each once, the others draw with replacement."""

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        size = RESAMPLES if count >= LEAST_PROMPTS else 0
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=size)
        self._weights = np.concatenate([np.ones((1, count)), drawn])

    def ratio(self, parts: Sequence[float], wholes: Sequence[float]) -> Array:
        """Σ parts / Σ wholes in each resample, [1 + RESAMPLES]; NaN where the whole is 0."""
        above, below = self._weights @ np.asarray(parts), self._weights @ np.asarray(wholes)
        with np.errstate(invalid="ignore", divide="ignore"):
            result: Array = np.where(below > 0, above / below, np.nan)
        return result


def interval(values: Array) -> Interval | None:
    """values: the estimate, then the resamples'. None where there is no estimate."""
    if np.isnan(values[0]):
        return None
    drawn = np.sort(values[1:][~np.isnan(values[1:])])
    if not len(drawn):
        return Interval(value=float(values[0]), low=None, high=None)
    cut = round(len(drawn) * (1 - LEVEL) / 2)
    low, high = drawn[cut], drawn[len(drawn) - 1 - cut]
    return Interval(value=float(values[0]), low=float(low), high=float(high))
