"""From single runs to figures: rates over summed tokens and times, medians over repeats.

A rate of a repeat is the tokens of all its prompts over the seconds they took, so long answers
count for more than short ones, as they do for a user. Acceptance is pooled over all repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .plan import Contestant, Run

ALL = "all"
PARTS = ("draft", "verify", "accept", "compact", "overhead")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request that was run: the decoder's own statistics, and its tokens."""

    run: Run
    token_ids: tuple[int, ...]
    stats: Mapping[str, Any]

    @property
    def category(self) -> str:
        return self.run.prompt.category


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, lowest and highest of the repeats."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(median=median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one contestant did on one category."""

    bundle: str
    mode: str
    category: str
    num_requests: int
    num_output_tokens: int
    decode_tokens_per_s: Spread  # tokens behind the first over decode time
    output_tokens_per_s: Spread  # all tokens over the whole request
    speedup: Spread | None  # decode rate over the same bundle's plain one, repeat by repeat
    ttft_s: Spread  # over requests
    num_rounds: int
    num_spec_rounds: int  # those that drafted
    acceptance_rate: float | None  # accepted / drafted
    mean_acceptance_length: float | None  # 1 + accepted / rounds that drafted
    tokens_per_round: float  # committed per target call, plain rounds included
    acceptance_histogram: tuple[int, ...]
    drafts_per_round: float | None  # verified in a round that drafted: of a tree all its nodes
    round_s: dict[str, float]  # draft, verify, accept, compact, overhead: seconds a round
    orchestration_share: float  # overhead_s / decode_s
    same_as_plain: float | None  # greedy: share of outputs equal to plain ones, token for token


def summarize(
    samples: Sequence[Sample], contestants: Sequence[Contestant], *, greedy: bool
) -> list[Figures]:
    """Figures of every contestant on all prompts together, then on each category."""
    names = dict.fromkeys(sample.category for sample in samples)
    groups = [ALL, *names] if len(names) > 1 else [ALL]
    return [
        _figures(chosen, plain, contestant, category, greedy)
        for category in groups
        for contestant in contestants
        if (chosen := _select(samples, contestant, category))
        for plain in [_select(samples, _plain(contestant), category)]
    ]


def _plain(contestant: Contestant) -> Contestant:
    return Contestant(bundle=contestant.bundle, draft_length=0)


def _select(samples: Iterable[Sample], contestant: Contestant, category: str) -> list[Sample]:
    return [s for s in samples if s.run.contestant == contestant and category in (ALL, s.category)]


def _figures(
    chosen: list[Sample],
    plain: list[Sample],
    contestant: Contestant,
    category: str,
    greedy: bool,
) -> Figures:
    drafting = _total(chosen, "num_spec_steps")
    rounds = drafting + _total(chosen, "num_plain_steps")
    accepted = _total(chosen, "num_accepted_draft_tokens")
    length = _ratio(accepted, drafting)
    return Figures(
        bundle=contestant.bundle,
        mode=contestant.label,
        category=category,
        num_requests=len(chosen),
        num_output_tokens=int(_total(chosen, "num_output_tokens")),
        decode_tokens_per_s=spread(list(_by_repeat(chosen, _decode_rate).values())),
        output_tokens_per_s=spread(list(_by_repeat(chosen, _whole_rate).values())),
        speedup=_speedup(chosen, plain) if contestant.draft_length else None,
        ttft_s=spread([s.stats["ttft_s"] for s in chosen]),
        num_rounds=int(rounds),
        num_spec_rounds=int(drafting),
        acceptance_rate=_ratio(accepted, _total(chosen, "num_draft_tokens")),
        mean_acceptance_length=None if length is None else 1 + length,
        tokens_per_round=_ratio(_total(chosen, "num_decode_tokens"), rounds) or 0.0,
        acceptance_histogram=_histogram(chosen),
        drafts_per_round=_ratio(_total(chosen, "num_draft_tokens"), drafting),
        round_s={part: _ratio(_total(chosen, f"{part}_s"), rounds) or 0.0 for part in PARTS},
        orchestration_share=_ratio(_total(chosen, "overhead_s"), _total(chosen, "decode_s")) or 0.0,
        same_as_plain=_agreement(chosen, plain) if greedy and contestant.draft_length else None,
    )


def _by_repeat(
    samples: Iterable[Sample], rate: Callable[[list[Sample]], float]
) -> dict[int, float]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.run.repeat, []).append(sample)
    return {repeat: rate(group) for repeat, group in sorted(groups.items())}


def _decode_rate(samples: list[Sample]) -> float:
    return _ratio(_total(samples, "num_decode_tokens"), _total(samples, "decode_s")) or 0.0


def _whole_rate(samples: list[Sample]) -> float:
    seconds = _total(samples, "ttft_s") + _total(samples, "decode_s")
    return _ratio(_total(samples, "num_output_tokens"), seconds) or 0.0


def _speedup(chosen: list[Sample], plain: list[Sample]) -> Spread | None:
    base = _by_repeat(plain, _decode_rate)
    pairs = [
        (rate, base[repeat])
        for repeat, rate in _by_repeat(chosen, _decode_rate).items()
        if base.get(repeat)
    ]
    return spread([rate / of for rate, of in pairs]) if pairs else None


def _agreement(chosen: list[Sample], plain: list[Sample]) -> float | None:
    expected = {(s.run.prompt.id, s.run.repeat): s.token_ids for s in plain}
    same = [s.token_ids == expected.get((s.run.prompt.id, s.run.repeat)) for s in chosen]
    return sum(same) / len(same) if plain else None


def _histogram(samples: list[Sample]) -> tuple[int, ...]:
    rows = [s.stats["acceptance_histogram"] for s in samples]
    return tuple(sum(column) for column in zip(*rows, strict=True))


def _total(samples: Iterable[Sample], name: str) -> float:
    return sum(float(s.stats[name]) for s in samples)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
