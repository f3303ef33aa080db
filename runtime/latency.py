"""The latency model of a bundle on this machine: what a round with k drafts costs in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import BundleError


@dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """Measured seconds of each part; tables may have gaps, which are filled linearly."""

    verify_s: Mapping[int, float]  # by query rows, 1 … k + 1
    accept_s: Mapping[int, float]  # by k, 0 …
    draft_s: float  # one step over one token
    draft_catch_up_s: float  # one step over two tokens
    draft_start_s: float = 0.0  # of a round's drafts, however many
    overhead_s: float  # outside the engine, per round
    acceptance: float | None = None  # of a first draft, as measured at build; None: not measured

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> LatencyProfile:
        """Read `reports/latency.json`; raises BundleError naming the key that does not fit."""
        return cls(
            verify_s=_table(report, "verify_s"),
            accept_s=_table(report, "accept_s"),
            draft_s=_seconds(report, "draft_s"),
            draft_catch_up_s=_seconds(report, "draft_catch_up_s"),
            draft_start_s=_seconds(report, "draft_start_s") if "draft_start_s" in report else 0.0,
            overhead_s=_seconds(report, "overhead_s"),
            acceptance=_share(report, "acceptance"),
        )

    def round_s(self, k: int) -> float:
        """A round with k drafts whose first step reads one token; k = 0 is plain decoding."""
        start_s = self.draft_start_s if k else 0.0
        return self.known_round_s(k) + start_s + k * self.draft_s

    def known_round_s(self, k: int) -> float:
        """A round with k drafts that were known beforehand."""
        return _at(self.verify_s, k + 1) + _at(self.accept_s, k) + self.overhead_s

    def read_s(self, unread: int) -> float:
        """What reading `unread` tokens costs a draft beyond reading one; over two are one call."""
        row_s = max(0.0, self.draft_catch_up_s - self.draft_s)
        return (unread - 1) * row_s + (self.draft_s if unread > 2 else 0.0)


def _at(table: Mapping[int, float], n: int) -> float:
    """The value at n, on the line through its two nearest neighbours where it was not measured."""
    if n in table:
        return table[n]
    known = sorted(table, key=lambda m: (abs(m - n), m))[:2]
    if len(known) == 1:
        return table[known[0]]
    a, b = sorted(known)
    return table[a] + (table[b] - table[a]) * (n - a) / (b - a)


def _table(report: Mapping[str, Any], key: str) -> dict[int, float]:
    raw = report.get(key)
    if not isinstance(raw, Mapping) or not raw:
        raise _unfit(key, raw, "a table of seconds by count")
    try:
        return {int(n): _positive(seconds) for n, seconds in raw.items()}
    except (TypeError, ValueError) as error:
        raise _unfit(key, raw, "a table of seconds by count") from error


def _seconds(report: Mapping[str, Any], key: str) -> float:
    try:
        return _positive(report.get(key))
    except (TypeError, ValueError) as error:
        raise _unfit(key, report.get(key), "seconds") from error


def _share(report: Mapping[str, Any], key: str) -> float | None:
    value = report.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _unfit(key, value, "a share from 0 to 1")
    return float(value)


def _positive(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(value)
    return float(value)


def _unfit(key: str, raw: object, expected: str) -> BundleError:
    return BundleError(
        f"reports/latency.json: {key}: received {raw!r}. Expected {expected}; rebuild the bundle."
    )
