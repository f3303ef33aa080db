"""Distributions and how far two of them are apart, in float64 from the graphs' float32 logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def law(logits: Array, temperature: float) -> Array:
    """p of each row [..., vocab]; at temperature 0 one-hot at the lowest likeliest id."""
    values = np.asarray(logits, np.float64)
    if temperature == 0:
        p = np.zeros_like(values)
        np.put_along_axis(p, values.argmax(-1)[..., None], 1.0, -1)
        return p
    return np.exp(log_law(values / temperature))


def log_law(logits: Array) -> Array:
    """log p of each row at temperature 1."""
    values = np.asarray(logits, np.float64)
    shifted = values - values.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def overlap(p: Array, q: Array, ids: Array) -> float:
    """Σ min(p, q): the chance that a token drawn from q is accepted (Leviathan et al., eq. 5).

    p: [vocab]; q: [D] of the tokens `ids`; p's other tokens have no q.
    """
    return float(np.minimum(p[ids], q).sum())


def apart(log_p: Array, log_q: Array) -> tuple[float, float]:
    """KL(p ‖ q) in nats, and the total variation of p and q."""
    p, q = np.exp(log_p), np.exp(log_q)
    return float(p @ (log_p - log_q)), float(np.abs(p - q).sum()) / 2


def top_margin(logits: Array) -> float:
    """By how much the likeliest token's logit leads the second's."""
    second, first = np.partition(np.asarray(logits, np.float64), -2)[-2:]
    return float(first - second)
