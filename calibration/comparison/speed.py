"""What acceptance means for speed, by the latency profiles that the bundles carry.

Profiles are measured at build, each on its own; no clock runs here, so that a bundle compared with
itself comes out equal. A pair takes its target's and its draft's times from their own bundles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.latency import LatencyProfile

from .cells import by_temperature, num_judged, overlap_of
from .records import Record
from .sides import PAIRS, Pair


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The best draft length and its speed; k = 0 is not speculating."""

    k: int
    tokens_per_s: float
    plain_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """By pair: from the rounds' acceptance by position, and from the text's mean acceptance."""

    temperature: float | str
    measured: Mapping[str, Rate]
    predicted: Mapping[str, Rate]


def speeds(records: Sequence[Record], profiles: Mapping[str, LatencyProfile]) -> list[Speed]:
    """profiles: of both sides, by their names."""
    return [_speed(temperature, at, profiles) for temperature, at in by_temperature(records)]


def _speed(
    temperature: float | str, records: Sequence[Record], profiles: Mapping[str, LatencyProfile]
) -> Speed:
    measured, predicted = {}, {}
    for pair in PAIRS:
        profile = _of_pair(pair, profiles)
        passed = _passed(records, pair.key) if records[0].rounds else []
        share = _share(records, pair.key)
        measured[pair.key] = _best(profile, passed)
        predicted[pair.key] = _best(profile, [share ** (j + 1) for j in range(len(passed))])
    return Speed(temperature=temperature, measured=measured, predicted=predicted)


def _share(records: Sequence[Record], key: str) -> float:
    """Mean acceptance; 0 where nothing was drafted."""
    tokens = sum(map(num_judged, records))
    return sum(map(overlap_of(key), records)) / tokens if tokens else 0.0


def _passed(records: Sequence[Record], key: str) -> list[float]:
    """For each position: the chance that the drafts up to it are all accepted."""
    count = sum(r.rounds[key].count for r in records)
    columns = zip(*(r.rounds[key].passed for r in records), strict=True)
    return [sum(column) / count for column in columns]


def _of_pair(pair: Pair, profiles: Mapping[str, LatencyProfile]) -> LatencyProfile:
    target, draft = profiles[pair.target], profiles[pair.draft]
    return LatencyProfile(
        verify_s=target.verify_s,
        accept_s=target.accept_s,
        overhead_s=target.overhead_s,
        draft_s=draft.draft_s,
        draft_catch_up_s=draft.draft_catch_up_s,
    )


def _best(profile: LatencyProfile, passed: Sequence[float]) -> Rate:
    """After a full accept the next round's draft reads one token more."""
    plain = 1 / profile.round_s(0)
    best, committed = Rate(k=0, tokens_per_s=plain, plain_tokens_per_s=plain), 1.0
    for k, chance in enumerate(passed, start=1):
        committed += chance
        rate = committed / (profile.round_s(k) + chance * profile.read_s(2))
        if rate > best.tokens_per_s:
            best = Rate(k=k, tokens_per_s=rate, plain_tokens_per_s=plain)
    return best
