"""What one round decided, and the seconds that its steps took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    num_drafted: int
    num_accepted: int
    #: the accepted drafts, then the recovered or bonus token, left out where a grammar has ended
    tokens: tuple[int, ...]
    draft_s: float
    verify_s: float
    accept_s: float
