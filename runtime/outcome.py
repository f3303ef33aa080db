"""What one round decided, and the seconds that its steps took."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Outcome:
    num_drafted: int
    num_accepted: int
    #: the accepted drafts, then the recovered or bonus token, left out where a grammar has ended
    tokens: tuple[int, ...]
    draft_s: float
    verify_s: float
    accept_s: float
    num_nodes: int | None = None  # of a tree: drafts that were verified; num_drafted is its depth
    ranks: tuple[int, ...] = ()  # of a tree: of each accepted draft among its siblings
    compact_s: float = 0.0  # of a tree: to move the accepted path's rows into place

    def undrafted(self) -> Outcome:
        """The same tokens as a plain round's: all that it shows of drafts that weren't made."""
        return replace(self, num_drafted=0, num_accepted=0)
