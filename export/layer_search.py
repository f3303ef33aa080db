"""Which layers a target drafts best without: the set with the best expected tokens per second.

A set is scored by what a round with it would bring, measured acceptance against measured cost, as
the runtime's planner weighs them (Draft & Verify searches the same objective by Bayesian
optimisation; a climb from good starts finds as good sets in our budgets, and says why).
The winner is judged on pages that the search never saw: the best of many is lucky on its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from runtime.latency import LatencyProfile
from runtime.layer_runs import as_text

Hits = Sequence[Sequence[bool]]  # by page, by token of the answer
Layers = frozenset[int]


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of what a round is made of."""

    verify_s: dict[int, float]  # by rows
    layer_s: float  # one layer, one row
    tail_s: float  # sampling a draft; deciding on one costs about as much

    def draft_s(self, skipped: Layers) -> float:
        return self.verify_s[1] - len(skipped) * self.layer_s + self.tail_s

    def profile(self, skipped: Layers) -> LatencyProfile:
        draft_s = self.draft_s(skipped)
        return LatencyProfile(
            verify_s=self.verify_s,
            accept_s={0: self.tail_s},
            draft_s=draft_s,
            draft_catch_up_s=draft_s,
            overhead_s=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a set brings at its best draft length."""

    skipped: Layers
    acceptance: float  # of a first draft
    draft_cost: float  # of a draft step, in plain steps
    k: int
    speedup: float  # over plain decoding, k ≥ 1

    def __str__(self) -> str:
        return (
            f"without layers {as_text(sorted(self.skipped))}: acceptance {self.acceptance:.2f}, a "
            f"draft costs {self.draft_cost:.2f} of a plain step, {self.speedup:.2f} × at k = "
            f"{self.k}"
        )


def score(skipped: Layers, hits: Hits, costs: StepCosts, most: int) -> Score:
    """The best k up to `most` for what was hit."""
    reached = [_reached(hits, k) for k in range(1, most + 1)]
    profile = costs.profile(skipped)
    plain_s = profile.round_s(0)
    speedups = [(1 + sum(reached[:k])) * plain_s / profile.round_s(k) for k in range(1, most + 1)]
    best = max(range(most), key=speedups.__getitem__)
    return Score(
        skipped=skipped,
        acceptance=reached[0],
        draft_cost=costs.draft_s(skipped) / plain_s,
        k=best + 1,
        speedup=speedups[best],
    )


def ceiling(skipped: Layers, costs: StepCosts, most: int) -> float:
    """The speed-up if every draft were accepted: what no acceptance can exceed."""
    return score(skipped, [[True] * most], costs, most).speedup


def _reached(hits: Hits, k: int) -> float:
    """The share of places from which k tokens in a row are hit: misses cluster, as drafts' do."""
    runs = [all(page[i : i + k]) for page in hits for i in range(len(page) - k + 1)]
    return sum(runs) / len(runs) if runs else 0.0


@dataclass(kw_only=True)
class LayerSearch:
    """A climb over sets of layers, until the deadline or the top of a hill."""

    layers: int
    evaluate: Callable[[Layers], Score]
    ceiling: Callable[[Layers], float]  # what is at most the best so far isn't tried
    deadline: float  # of perf_counter
    seen: dict[Layers, Score] = field(default_factory=dict)

    def run(self) -> Score:
        """The best set found; at least one is tried."""
        for candidate in self._starts():
            if self._may_win(candidate) or len(candidate) == 1:
                self._try(candidate)
            if self._late():
                break
        while not self._late() and self._climb():
            pass
        return self._best()

    def _starts(self) -> Iterator[Layers]:
        """Ends of several lengths, then each layer alone, then the least missed ones together.

        A layer alone is tried for what it tells, though it can't win.
        """
        n = self.layers
        yield frozenset(range(max(1, n // 3), n - n // 3))
        for first in range(1, n, max(1, n // 12)):
            yield frozenset(range(first, n))
            yield frozenset(range(first, n - 1)) or frozenset([n - 1])
        for layer in range(n):
            yield frozenset([layer])
        singles = [s for s in self.seen.values() if len(s.skipped) == 1]
        order = [min(s.skipped) for s in sorted(singles, key=lambda s: -s.acceptance)]
        for count in range(2, n, max(1, n // 12)):
            yield frozenset(order[:count])

    def _climb(self) -> bool:
        """One better neighbour of the best set: a layer more, a layer less, or one for another."""
        best = self._best()
        for candidate in _neighbours(best.skipped, self.layers):
            if self._late():
                return False
            if candidate in self.seen or not self._may_win(candidate):
                continue
            if self._try(candidate).speedup > best.speedup:
                return True
        return False

    def _try(self, candidate: Layers) -> Score:
        if candidate not in self.seen:
            self.seen[candidate] = self.evaluate(candidate)
        return self.seen[candidate]

    def _may_win(self, candidate: Layers) -> bool:
        return not self.seen or self.ceiling(candidate) > self._best().speedup

    def _best(self) -> Score:
        return max(self.seen.values(), key=lambda s: s.speedup)

    def _late(self) -> bool:
        return perf_counter() >= self.deadline


def _neighbours(skipped: Layers, layers: int) -> list[Layers]:
    """Toggles in a fixed random order, then exchanges."""
    everyone = range(layers)
    toggled = [skipped ^ {layer} for layer in everyone]
    swapped = [skipped - {a} | {b} for a in skipped for b in everyone if b not in skipped]
    generator = random.Random(len(skipped))
    generator.shuffle(toggled)
    generator.shuffle(swapped)
    return [one for one in (*toggled, *swapped) if 0 < len(one) < layers]
