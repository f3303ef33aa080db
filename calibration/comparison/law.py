"""Distributions and how far two of them are apart, in float64 from the graphs' float32 logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def law(logits: Array, temperature: float) -> Array:
    """p of each row [..., vocab]; at temperature 0 one-hot at the lowest likeliest id."""
    if temperature == 0:
        p: Array = np.zeros(np.shape(logits))
        np.put_along_axis(p, np.argmax(logits, -1)[..., None], 1.0, -1)
        return p
    return _laws(logits, temperature)[0]


def log_law(logits: Array) -> Array:
    """log p of each row at temperature 1."""
    return _laws(logits)[1]


def _laws(logits: Array, temperature: float = 1.0) -> tuple[Array, Array]:
    """p and log p. In place where it can be: a row has as many numbers as there are tokens."""
    log_p: Array = np.asarray(logits, np.float64) / temperature
    log_p -= log_p.max(-1, keepdims=True)
    p: Array = np.exp(log_p)
    total = p.sum(-1, keepdims=True)
    p /= total
    log_p -= np.log(total)
    return p, log_p


def overlap(p: Array, q: Array, ids: Array) -> float:
    """Σ min(p, q): the chance that a token drawn from q is accepted (Leviathan et al., eq. 5).

    p: [vocab]; q: [D] of the tokens `ids`, ascending; p's other tokens have no q.
    """
    known = p if len(ids) == len(p) else p[ids]
    return float(np.minimum(known, q).sum())


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Two laws of the next token; `token` is the one that followed."""

    kl: float  # KL(p ‖ q) in nats
    tv: float
    nll_p: float  # −log p(token)
    nll_q: float

    @classmethod
    def of(cls, logits_p: Array, logits_q: Array, token: int) -> Apart:
        """At temperature 1, from one row of logits each: [vocab]."""
        (p, log_p), (q, log_q) = _laws(logits_p), _laws(logits_q)
        nll_p, nll_q = -float(log_p[token]), -float(log_q[token])
        log_p -= log_q
        kl = float(p @ log_p)
        p -= q
        tv = float(np.abs(p, out=p).sum()) / 2
        return cls(kl=kl, tv=tv, nll_p=nll_p, nll_q=nll_q)


def top_margin(logits: Array) -> float:
    """By how much the likeliest token's logit leads the second's."""
    second, first = np.partition(np.asarray(logits, np.float64), -2)[-2:]
    return float(first - second)
