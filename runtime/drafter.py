"""What a round asks of a drafter; a draft model is one, lookup another, heads may follow.

A round goes `offer` → the planner chooses k → `propose`, then `rollback` to what was accepted.

Invariant: after `rollback(n)` nothing that the drafter holds stems from a token beyond the first n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .acceptance import Acceptance
from .constraint import Constraint
from .offer import Offer


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a drafter came up with: fewer tokens than asked for where it has no more."""

    num_drafted: int
    seconds: float  # that it took
    drawn: bool = True  # each from its row of draft_probs; else certain


#: `Drafter.propose`, or that of one of the ways that a drafter has
Propose = Callable[[Sequence[int], int, Constraint], Proposal]


class Drafter(Protocol):
    """Proposes tokens: writes k drafts and their rows of q into the shared round buffers."""

    @property
    def length(self) -> int:
        """Committed tokens up to which the drafter has read."""

    def acceptance(self, measured: float | None) -> Acceptance:
        """What a request begins to believe of its acceptance; `measured`: at build, if it was."""

    def offer(self, tokens: Sequence[int], most: int) -> Offer:
        """What it could draft behind the committed `tokens`, at most `most` ≥ 1; next to free."""

    def propose(self, tokens: Sequence[int], k: int, constraint: Constraint) -> Proposal:
        """Draft up to k ≥ 1 tokens behind the committed `tokens`, each one that may follow.

        Opens the constraint's row of every draft and tells it the draft.
        """

    def rollback(self, length: int) -> None:
        """Forget everything beyond the first `length` tokens."""
