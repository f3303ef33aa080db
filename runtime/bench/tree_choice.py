"""Which tree pays on this machine, if any: from acceptance by rank and depth, and measured costs.

A draft of rank r at depth d is taken to pass with one probability, wherever it stands. Then the
drafts most likely to be accepted, by the product along their path, are the best tree of each size
(Chen et al. 2024, arXiv 2402.12374, section 4.1, without its dynamic program: with rates that
depend on rank and depth alone, taking the likeliest first is the best), and what it commits is one
and the sum of these products. A chain and plain decoding are measured by the same rule.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from ..decoder import Decoder
from ..round import Rounds
from ..tree import Tree
from .summary import Sample

REPEATS = 9
CONTEXT = 256
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
Rates = Sequence[Sequence[float]]  # [depth][rank]


@dataclass(frozen=True, kw_only=True)
class Sized:
    """The best of one number of drafts."""

    nodes: int
    widths: str  # nodes at each depth
    parents: tuple[int, ...]
    tokens: float  # expected to be committed by one verification
    verify_s: float
    draft_s: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class TreeChoice:
    bundle: str
    rates: list[list[float]]  # [depth][rank], as measured
    plain_tokens_per_s: float
    trees: list[Sized]
    chains: list[Sized]
    answer: str


def choose_tree(name: str, decoder: Decoder, samples: Sequence[Sample]) -> TreeChoice:
    """Weigh trees, chains and plain decoding by what the bundle's tree runs have shown."""
    ours = [s for s in samples if s.run.contestant.bundle == name]
    with_trees = [s for s in ours if s.run.contestant.tree is not None]
    rates = measured_rates(with_trees)
    rounds = decoder.rounds
    limit = max(1, rounds.buffers.logits.shape[1] - 1)
    sizes = [size for size in SIZES if size <= limit]
    verify_s = measure_sizes(
        rounds, sorted({0, *sizes, *range(1, len(rates) + 1)} & set(range(limit + 1)))
    )
    level_s = level_seconds(with_trees, verify_s)
    chains_drafted = [s for s in ours if isinstance(s.run.contestant.draft_length, int)]
    # One row at a time: a chain's costs less.
    step_s = level_seconds(chains_drafted, verify_s) or level_s
    overhead_s = _part_s(with_trees, "accept") + _part_s(with_trees, "overhead")
    plain_s = verify_s[0] + overhead_s

    def cost(nodes: int) -> float:
        return verify_s[min(size for size in verify_s if size >= nodes)]

    def sized(tree: Tree, chances: list[float], each_s: float) -> Sized:
        tokens, draft_s = 1 + sum(chances), each_s * tree.depth
        counts = [tree.depths.count(depth) for depth in range(1, tree.depth + 1)]
        return Sized(
            nodes=tree.size,
            widths="-".join(map(str, counts)),
            parents=tree.parents,
            tokens=tokens,
            verify_s=cost(tree.size),
            draft_s=draft_s,
            tokens_per_s=tokens / (cost(tree.size) + draft_s + overhead_s),
        )

    chains = [sized(*best_chain(rates, size), step_s) for size in sizes]
    trees = [sized(*best_tree(rates, size), level_s) for size in sizes]
    return TreeChoice(
        bundle=name,
        rates=[list(row) for row in rates],
        plain_tokens_per_s=1 / plain_s,
        trees=trees,
        chains=chains,
        answer=_answer(name, 1 / plain_s, trees, chains),
    )


def measured_rates(samples: Sequence[Sample]) -> list[list[float]]:
    """[depth][rank]: accepted of those rounds that got to the depth."""
    reached = [s.stats["reached_per_depth"] for s in samples]
    accepted = [s.stats["accepted_per_rank"] for s in samples]
    rates = []
    for depth, count in enumerate(map(sum, zip(*reached, strict=True))):
        ranks = map(sum, zip(*(table[depth] for table in accepted), strict=True))
        rates.append([hits / count if count else 0.0 for hits in ranks])
    return rates


def best_tree(rates: Rates, nodes: int) -> tuple[Tree, list[float]]:
    """The likeliest `nodes` drafts, and how likely each is accepted; fewer where rates are 0."""
    parents: list[int] = []
    chances: list[float] = []
    waiting = [(-rates[0][0], 0, 0, 0, 1.0)] if rates else []  # −chance, parent, depth, rank, its
    while waiting and len(parents) < nodes:
        negative, parent, depth, rank, chance = heapq.heappop(waiting)
        if negative >= 0:
            break
        parents.append(parent)
        chances.append(-negative)
        row = len(parents)
        if rank + 1 < len(rates[depth]):
            sibling = (-chance * rates[depth][rank + 1], parent, depth, rank + 1, chance)
            heapq.heappush(waiting, sibling)
        if depth + 1 < len(rates):
            child = (negative * rates[depth + 1][0], row, depth + 1, 0, -negative)
            heapq.heappush(waiting, child)
    return Tree(tuple(parents)), chances


def measure_sizes(rounds: Rounds, sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of a verification of so many drafts, interleaved, medians."""
    context = min(CONTEXT, rounds.target.max_context // 2)
    rounds.rollback(1)
    rounds.target.length = context
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(REPEATS):
        for size in sizes:
            start = perf_counter()
            rounds.target.verify_tree(size + 1)
            times[size].append(perf_counter() - start)
    rounds.forget()
    return {size: median(found) for size, found in times.items()}


def best_chain(rates: Rates, most: int) -> tuple[Tree, list[float]]:
    """The longest of at most `most` drafts whose rates were measured, and their chances."""
    chances, chance = list[float](), 1.0
    for depth in range(min(most, len(rates))):
        chance *= rates[depth][0]
        chances.append(chance)
    return Tree.chain(len(chances)), chances


def level_seconds(samples: Sequence[Sample], verify_s: Mapping[int, float]) -> float:
    """That a level of drafts took; of rounds that are one launch, whose parts can't be told apart,
    what they took beyond a verification of as many drafts."""
    levels = sum(sum(s.stats["drafted_per_position"]) for s in samples)
    drafted_s = sum(float(s.stats["draft_s"]) for s in samples)
    if not drafted_s:
        drafted_s = sum(_beyond_verification(s, verify_s) for s in samples)
    return drafted_s / levels if levels else 0.0


def _beyond_verification(sample: Sample, verify_s: Mapping[int, float]) -> float:
    stats, length = sample.stats, sample.run.contestant.draft_length
    nodes = length if isinstance(length, int) else getattr(length, "nodes", 0)
    each_s = verify_s[min((size for size in verify_s if size >= nodes), default=max(verify_s))]
    alone_s = stats["num_spec_steps"] * each_s + stats["num_plain_steps"] * verify_s[0]
    return max(0.0, float(stats["verify_s"] - alone_s))


def _part_s(samples: Sequence[Sample], part: str) -> float:
    rounds = sum(s.stats["num_spec_steps"] + s.stats["num_plain_steps"] for s in samples)
    return sum(float(s.stats[f"{part}_s"]) for s in samples) / rounds if rounds else 0.0


def _answer(name: str, plain: float, trees: Sequence[Sized], chains: Sequence[Sized]) -> str:
    tree = max(trees, key=lambda one: one.tokens_per_s)
    chain = max(chains, key=lambda one: one.tokens_per_s)
    best = max((tree.tokens_per_s, "tree"), (chain.tokens_per_s, "chain"), (plain, "plain"))[1]
    figures = (
        f"expected tok/s: plain {plain:.1f}, chain of {chain.nodes} {chain.tokens_per_s:.1f}, "
        f"tree of {tree.nodes} ({tree.widths}) {tree.tokens_per_s:.1f}"
    )
    return f"{name}: best here: {'no speculation' if best == 'plain' else f'a {best}'}; {figures}."
