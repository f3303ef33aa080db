"""What a round asks of a drafter; a draft model is one, lookup or a head may be others.

Invariant: after `rollback(n)` nothing that the drafter holds stems from a token beyond the first n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .constraint import Constraint


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a drafter came up with: fewer tokens than asked for where it has no more."""

    num_drafted: int
    seconds: float  # in the engine


class Drafter(Protocol):
    """Proposes tokens: writes k drafts and their rows of q into the shared round buffers."""

    @property
    def length(self) -> int:
        """Committed tokens up to which the drafter has read."""

    def room(self) -> int:
        """The most tokens that it can draft in one round."""

    def unread(self, committed: int) -> int:
        """Tokens that it would read before drafting behind `committed` tokens; at least 1."""

    def propose(self, tokens: Sequence[int], k: int, constraint: Constraint) -> Proposal:
        """Draft up to k ≥ 1 tokens behind the committed `tokens`, each one that may follow.

        Opens the constraint's row of every draft and tells it the draft.
        """

    def rollback(self, length: int) -> None:
        """Forget everything beyond the first `length` tokens."""
