"""Rounds by position, and how many tokens a verification commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .cells import Intervals, Prompts, by_temperature, differences, num_tokens, overlap_of
from .records import Record, Rounds
from .resamples import interval
from .sides import PAIRS

KEYS = tuple(pair.key for pair in PAIRS)


@dataclass(frozen=True, kw_only=True)
class Position:
    """One place in a round, 1 first, given that the drafts before it were accepted."""

    temperature: float | str
    position: int
    acceptance: Intervals  # expected
    realised: Mapping[str, float | None]  # accepted / evaluated
    evaluated: Mapping[str, int]
    differences: Intervals


@dataclass(frozen=True, kw_only=True)
class Length:
    """Mean acceptance length at the comparison's k: tokens committed per verification."""

    temperature: float | str
    predicted: Mapping[str, float]  # from the text's acceptance alone, the same at each position
    rounds: Intervals  # expected, over the rounds
    realised: Mapping[str, float]  # 1 + accepted / rounds
    free: Mapping[str, float | None]  # text that the pair wrote by itself
    differences: Intervals  # of `rounds`


def positions(records: Sequence[Record], seed: int) -> list[Position]:
    """None where nothing was drafted."""
    return [
        _position(temperature, j, Prompts(at, seed))
        for temperature, at in by_temperature(records)
        for j in range(_draft_length(records))
    ]


def lengths(records: Sequence[Record], seed: int) -> list[Length]:
    """None where nothing was drafted."""
    if not _draft_length(records):
        return []
    return [_length(temperature, Prompts(at, seed)) for temperature, at in by_temperature(records)]


def _position(temperature: float | str, j: int, prompts: Prompts) -> Position:
    shares, evaluated, accepted = {}, {}, {}
    for key in KEYS:
        passed, reached = _of(key, lambda r: r.passed[j]), _of(key, lambda r: r.reached[j])
        shares[key] = prompts.ratio(passed, reached)
        evaluated[key] = int(prompts.total(_of(key, lambda r: r.evaluated[j])))
        accepted[key] = prompts.total(_of(key, lambda r: r.accepted[j]))
    return Position(
        temperature=temperature,
        position=j + 1,
        acceptance={key: interval(values) for key, values in shares.items()},
        realised={k: accepted[k] / n if n else None for k, n in evaluated.items()},
        evaluated=evaluated,
        differences=differences(shares),
    )


def _length(temperature: float | str, prompts: Prompts) -> Length:
    expected = {
        key: 1 + prompts.ratio(_of(key, lambda r: sum(r.passed)), _of(key, lambda r: r.count))
        for key in KEYS
    }
    return Length(
        temperature=temperature,
        predicted={key: _predicted(prompts, key) for key in KEYS},
        rounds={key: interval(values) for key, values in expected.items()},
        realised={key: _realised(prompts, key) for key in KEYS},
        free={key: _free(prompts, key) for key in KEYS},
        differences=differences(expected),
    )


def _predicted(prompts: Prompts, key: str) -> float:
    """Σ α^j for j from 0 to k (Leviathan et al., eq. 1)."""
    share = prompts.total(overlap_of(key)) / prompts.total(num_tokens)
    return float(sum(share**j for j in range(_draft_length(prompts.groups[0]) + 1)))


def _realised(prompts: Prompts, key: str) -> float:
    accepted, count = _of(key, lambda r: sum(r.accepted)), _of(key, lambda r: r.count)
    return 1 + prompts.total(accepted) / prompts.total(count)


def _free(prompts: Prompts, key: str) -> float | None:
    written = [r.free[key] for group in prompts.groups for r in group if key in r.free]
    rounds = sum(text.rounds for text in written)
    return sum(text.tokens for text in written) / rounds if rounds else None


def _of(key: str, value: Callable[[Rounds], float]) -> Callable[[Record], float]:
    return lambda record: value(record.rounds[key])


def _draft_length(records: Sequence[Record]) -> int:
    """The comparison's k; 0 where nothing was drafted."""
    rounds = records[0].rounds
    return len(rounds[KEYS[0]].reached) if rounds else 0
