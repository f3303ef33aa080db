"""The law of a whole round, enumerated: no sampling, so no luck.

The graphs are asked for every decision that they can take. A decision is a monotone function of one
uniform, and a uniform is one of 2²⁴ numbers, so the share of them that leads to each outcome is
found exactly, by bisection. Multiplied along every path of drafts this is the law of the k + 1
tokens that a round and, where it ends early, the target itself commit. It must be the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from runtime.bundle import Bundle

from .report import Certificate, Figures, judged
from .round_graphs import STEPS, Places, RoundGraphs
from .world import (
    CASES,
    Array,
    LawCase,
    Laws,
    Tokens,
    World,
    completed,
    target_law,
    total_variation,
)

NAME = "law"
CLAIM = "The law of a round, enumerated, is the target's, for every transform."
SMALL = {
    "4 tokens, k = 2": World(vocab=4, k=2),
    "5 tokens, a draft of 3, k = 2": World(vocab=5, k=2, drafts=(0, 2, 3)),
}
LIMIT = 1e-6  # total variation that float32 and 24-bit uniforms may cost


def certify(bundle: Bundle, progress: Callable[[str], None] = lambda _: None) -> Certificate:
    """Small vocabularies through graphs of this version; a few tokens through the bundle's own."""
    figures: Figures = {"limit": LIMIT, "total_variation": {}}
    faults = []
    for name, world, graphs in _worlds(bundle):
        for case in CASES:
            progress(f"{name}: {case.name}")
            found = distance(case, world, graphs)
            figures["total_variation"][f"{name}: {case.name}"] = found
            if not found <= LIMIT:
                faults.append(f"{name}, {case.name}: total variation {found:.2g}")
    figures["worst"] = max(figures["total_variation"].values())
    return judged(NAME, CLAIM, figures, faults)


def _worlds(bundle: Bundle) -> Iterator[tuple[str, World, RoundGraphs]]:
    for name, world in SMALL.items():
        yield name, world, RoundGraphs.small(world)
    world, places = few_tokens(bundle)
    yield "this bundle's accept.onnx", world, RoundGraphs.own(bundle.model_path("accept"), places)


def few_tokens(bundle: Bundle) -> tuple[World, Places]:
    """Four tokens spread over the bundle's vocabulary, one of them not the draft's if any isn't."""
    vocab = bundle.manifest.target.vocab_size
    draft_vocab = bundle.manifest.draft_vocab_size
    ids = np.arange(draft_vocab) + (0 if bundle.d2t is None else bundle.d2t)
    ids = ids[ids < vocab]
    columns = [0, len(ids) // 3, len(ids) - 1]
    others = np.setdiff1d(np.arange(vocab), ids)
    fourth = int(others[len(others) // 2]) if len(others) else int(ids[len(ids) // 2])
    chosen = sorted({fourth, *(int(ids[c]) for c in columns)})
    drafts = tuple(chosen.index(int(ids[c])) for c in columns)
    places = Places(ids=tuple(chosen), vocab=vocab, columns=tuple(columns), draft_vocab=draft_vocab)
    return World(vocab=len(chosen), k=1, drafts=drafts), places


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
    accepts = bisect(lambda u: accept.accepted(u) > np.arange(k), k)
    rows, edges = np.divmod(np.arange((k + 1) * (world.vocab - 1)), world.vocab - 1)
    below = bisect(lambda u: accept.drawn(u, rows) <= edges, len(edges)).reshape(k + 1, -1)
    return accepts, [steps(row) for row in below]


def _shares(holds: Callable[[Array], Array], count: int) -> Array:
    """Shares of count + 1 outcomes in order; question i asks for at most outcome i."""
    return steps(bisect(holds, count))


def steps(below: Array) -> Array:
    return np.diff(np.concatenate([[0.0], below, [1.0]]))


def bisect(holds: Callable[[Array], Array], count: int) -> Array:
    """Share of the uniforms for which each question holds; it holds up to some uniform only."""
    low, high = np.zeros(count, np.int64), np.full(count, STEPS, np.int64)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, STEPS - 1)
        yes = holds((middle / STEPS).astype(np.float32))
        low, high = np.where(yes, np.minimum(middle + 1, high), low), np.where(yes, high, middle)
        low = np.minimum(low, high)
    return low / STEPS
