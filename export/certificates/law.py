"""The law of a whole round, enumerated: no sampling, so no luck.

The graphs are asked for every decision that they can take. A decision is a monotone function of one
uniform, and a uniform is one of 2²⁴ numbers, so the share of them that leads to each outcome is
found exactly, by bisection. Multiplied along every path of drafts this is the law of the k + 1
tokens that a round and, where it ends early, the target itself commit. It must be the target's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .round_graphs import STEPS, RoundGraphs
from .world import Array, LawCase, Laws, Tokens, World, completed, target_law, total_variation

LIMIT = 1e-6  # total variation that float32 and 24-bit uniforms may cost


def distance(case: LawCase, world: World, graphs: RoundGraphs) -> float:
    """Total variation between the law of a round and the target's own."""
    return total_variation(round_law(case, world, graphs), target_law(case, world))


def round_law(case: LawCase, world: World, graphs: RoundGraphs) -> Laws:
    """The law of k + 1 tokens as a round of the graphs gives it."""
    law: Laws = {}
    for prefix, mass in _committed(case, world, graphs).items():
        for rest, share in completed(case, world, prefix, world.k + 1 - len(prefix)):
            law[rest] = law.get(rest, 0.0) + mass * share
    return law


@dataclass(frozen=True, kw_only=True)
class _Path:
    """k drafts, the rows of q that they were drawn from, and how likely they are drawn."""

    tokens: Tokens
    probs: tuple[Array, ...]  # [draft_vocab] f32 each
    mass: float


def _committed(case: LawCase, world: World, graphs: RoundGraphs) -> Laws:
    """What one round commits, and how likely."""
    law: Laws = {}
    for path in _paths(case, world, graphs):
        alive = path.mass
        accepts, draws = _decisions(case, world, graphs, path)
        for row, draw in enumerate(draws):
            passes = accepts[row] if row < world.k else 0.0
            for token in np.flatnonzero(draw) if alive * (1 - passes) > 0 else ():
                key = (*path.tokens[:row], int(token))
                law[key] = law.get(key, 0.0) + alive * float((1 - passes) * draw[token])
            alive *= float(passes)
    return law


def _paths(case: LawCase, world: World, graphs: RoundGraphs) -> list[_Path]:
    paths = [_Path(tokens=(), probs=(), mass=1.0)]
    for _ in range(world.k):
        longer = []
        for path in paths:
            q, shares = _draft_law(case, world, graphs, path.tokens)
            longer += [
                replace(
                    path,
                    tokens=(*path.tokens, world.draft_ids[i]),
                    probs=(*path.probs, q),
                    mass=path.mass * float(shares[i]),
                )
                for i in np.flatnonzero(shares)
            ]
        paths = longer
    return paths


def _draft_law(
    case: LawCase, world: World, graphs: RoundGraphs, prefix: Tokens
) -> tuple[Array, Array]:
    """q as the graph states it, and the shares in which it really draws each draft token."""
    step = graphs.draft_step(case, world, prefix)
    edges = np.arange(len(world.draft_ids) - 1)
    return step.q, _shares(lambda u: step.drawn(u) <= edges, len(edges))


def _decisions(
    case: LawCase, world: World, graphs: RoundGraphs, path: _Path
) -> tuple[Array, list[Array]]:
    """Share of uniforms that accepts each draft [k], and what is drawn in each row [vocab]."""
    k = world.k
    accept = graphs.accept(case, world, path.tokens, path.probs)
    accepts = _bisect(lambda u: accept.accepted(u) > np.arange(k), k)
    rows, edges = np.divmod(np.arange((k + 1) * (world.vocab - 1)), world.vocab - 1)
    below = _bisect(lambda u: accept.drawn(u, rows) <= edges, len(edges)).reshape(k + 1, -1)
    return accepts, [_steps(row) for row in below]


def _shares(holds: Callable[[Array], Array], count: int) -> Array:
    """Shares of count + 1 outcomes in order; question i asks for at most outcome i."""
    return _steps(_bisect(holds, count))


def _steps(below: Array) -> Array:
    return np.diff(np.concatenate([[0.0], below, [1.0]]))


def _bisect(holds: Callable[[Array], Array], count: int) -> Array:
    """Share of the uniforms for which each question holds; it holds up to some uniform only."""
    low, high = np.zeros(count, np.int64), np.full(count, STEPS, np.int64)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, STEPS - 1)
        yes = holds((middle / STEPS).astype(np.float32))
        low, high = np.where(yes, np.minimum(middle + 1, high), low), np.where(yes, high, middle)
        low = np.minimum(low, high)
    return low / STEPS
