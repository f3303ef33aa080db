"""One round, drafted by one side and judged by either: the same uniforms decide in all four pairs.

Position j of a round is its j-th drafted token, behind j - 1 tokens that the draft itself drew, and
is reached when those were accepted. Behind text that is committed already, position 1 has the law
of plain teacher forcing; only rounds show what the later positions accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.reference import draw, recovered

from .drafting import Drafted
from .graphs import TargetGraph
from .law import law, overlap

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a target makes of a round's drafts."""

    overlap: tuple[float, ...]  # Σ min(p, q) at each position
    chance: tuple[float, ...]  # min(1, p/q) of each drafted token
    num_accepted: int  # by the accept uniforms
    next_token: int  # recovered or bonus


def verify(
    target: TargetGraph, last: int, drafts: Sequence[int], temperature: float
) -> Array:  # [k + 1, vocab] f64
    """p behind the `last` committed token and each draft. Leaves the target k + 1 rows further."""
    return law(target.rows([last, *drafts]), temperature)


def judge(
    p: Array,  # [k + 1, vocab]
    drafted: Drafted,
    accept_uniforms: Array,  # [k], of at least as many as were drafted
    draw_uniforms: Array,  # [k + 1]
) -> Judged:
    """Accept while u · q(x) < p(x), then draw one token more (Leviathan et al., algorithm 1)."""
    chances = [
        min(1.0, float(p[j, x]) / q_x) if q_x > 0 else 0.0
        for j, (x, q_x) in enumerate(zip(drafted.tokens, drafted.q_of_token, strict=True))
    ]
    fits = [bool(u < chance) for u, chance in zip(accept_uniforms, chances, strict=False)]
    accepted = fits.index(False) if False in fits else len(fits)
    return Judged(
        overlap=tuple(overlap(p[j], q, drafted.ids) for j, q in enumerate(drafted.q)),
        chance=tuple(chances),
        num_accepted=accepted,
        next_token=_next_token(p[accepted], drafted, accepted, float(draw_uniforms[accepted])),
    )


def _next_token(p: Array, drafted: Drafted, accepted: int, uniform: float) -> int:
    """From the residual where a draft was rejected, from p behind k accepted ones."""
    if accepted == len(drafted.tokens):
        return draw(p, uniform)
    q = np.zeros(len(p))
    q[drafted.ids] = drafted.q[accepted]
    return draw(recovered(p, q), uniform)
