"""Acceptance and drift of each temperature and category: sums of records become figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .records import Record
from .resamples import Interval, Resamples, interval
from .sides import DIFFERENCES, PAIRS

Array = NDArray[Any]
ALL = "all"
MOST_NATS = 700.0  # e to this is still a float
Intervals = Mapping[str, Interval | None]


@dataclass(frozen=True, kw_only=True)
class Drifted:
    """The bundle's target against the reference's: means over the text's tokens, in nats."""

    kl: Interval | None
    tv: Interval | None
    flip_rate: Interval | None  # of the likeliest token
    median_flip_margin: float | None  # the reference's lead there, in logits
    perplexity_reference: float
    perplexity_bundle: float
    nll_difference: Interval | None  # bundle − reference


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One temperature ("all" pools them) and category; mappings are by pair or difference."""

    temperature: float | str
    category: str
    prompts: int
    tokens: int
    acceptance: Intervals  # mean Σ min(p, q) over the reference's text
    differences: Intervals
    drift: Drifted


class Prompts:
    """The records of a cell, summed by prompt, and the resamples that all its figures share."""

    def __init__(self, records: Sequence[Record], seed: int) -> None:
        ordered = sorted(records, key=lambda r: r.prompt)
        groups = itertools.groupby(ordered, key=lambda r: r.prompt)
        self.groups = [list(group) for _, group in groups]
        self._resamples = Resamples(len(self.groups), seed)

    def sums(self, value: Callable[[Record], float]) -> list[float]:
        return [sum(value(record) for record in group) for group in self.groups]

    def total(self, value: Callable[[Record], float]) -> float:
        return sum(self.sums(value))

    def ratio(self, part: Callable[[Record], float], whole: Callable[[Record], float]) -> Array:
        return self._resamples.ratio(self.sums(part), self.sums(whole))


def cells(records: Sequence[Record], seed: int) -> list[Cell]:
    """Every temperature and all of them, times every category and all of them."""
    return [
        _cell(temperature, category, Prompts(chosen, seed))
        for temperature, at in by_temperature(records)
        for category, chosen in _by_category(at)
    ]


def by_temperature(
    records: Sequence[Record],
) -> list[tuple[float | str, Sequence[Record]]]:
    temperatures = sorted({r.temperature for r in records})
    single = [(t, [r for r in records if r.temperature == t]) for t in temperatures]
    return [*single, *([(ALL, records)] if len(single) > 1 else [])]


def _by_category(records: Sequence[Record]) -> list[tuple[str, Sequence[Record]]]:
    names = list(dict.fromkeys(r.category for r in records))
    single = [(name, [r for r in records if r.category == name]) for name in names]
    return [(ALL, records), *(single if len(single) > 1 else [])]


def num_tokens(record: Record) -> float:
    return len(record.path)


def num_judged(record: Record) -> float:
    """Tokens at which drafts were tried."""
    return len(record.path) if record.overlap else 0


def overlap_of(key: str) -> Callable[[Record], float]:
    return lambda record: record.overlap.get(key, 0.0)


def _cell(temperature: float | str, category: str, prompts: Prompts) -> Cell:
    shares = {pair.key: prompts.ratio(overlap_of(pair.key), num_judged) for pair in PAIRS}
    return Cell(
        temperature=temperature,
        category=category,
        prompts=len(prompts.groups),
        tokens=int(sum(prompts.sums(num_tokens))),
        acceptance={key: interval(values) for key, values in shares.items()},
        differences=differences(shares),
        drift=_drifted(prompts),
    )


def differences(values: Mapping[str, Array]) -> dict[str, Interval | None]:
    return {d.name: interval(values[d.changed.key] - values[d.base.key]) for d in DIFFERENCES}


def _drifted(prompts: Prompts) -> Drifted:
    ours = prompts.ratio(lambda r: r.drift.nll_reference, num_tokens)
    theirs = prompts.ratio(lambda r: r.drift.nll_bundle, num_tokens)
    margins = [m for group in prompts.groups for r in group for m in r.drift.flip_margins]
    return Drifted(
        kl=interval(prompts.ratio(lambda r: r.drift.kl, num_tokens)),
        tv=interval(prompts.ratio(lambda r: r.drift.tv, num_tokens)),
        flip_rate=interval(prompts.ratio(lambda r: len(r.drift.flips), num_tokens)),
        median_flip_margin=float(np.median(margins)) if margins else None,
        perplexity_reference=math.exp(min(ours[0], MOST_NATS)),
        perplexity_bundle=math.exp(min(theirs[0], MOST_NATS)),
        nll_difference=interval(theirs - ours),
    )
