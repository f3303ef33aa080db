"""Lookup where the text says already what comes, another drafter elsewhere: one of them a round.

Each keeps what it holds and its own q, one-hot or dense, so a round is exact whichever drafted it.
The other one's cache falls behind while lookups commit; it catches up when it is next asked, and
its offer says how much it has to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .acceptance import PRIOR_ACCEPTANCE, Acceptance, AcceptanceOfEither, prior_of_support
from .constraint import Constraint
from .drafter import Drafter, Proposal
from .offer import Offer


class NgramPlus:
    """Two drafters, of which a round asks one."""

    def __init__(self, lookup: Drafter, other: Drafter) -> None:
        self._lookup = lookup
        self._other = other

    @property
    def length(self) -> int:
        """The other one's: a lookup has read what it was last asked about."""
        return self._other.length

    def acceptance(self, measured: float | None) -> Acceptance:
        return AcceptanceOfEither(
            known=self._lookup.acceptance(None), drafted=self._other.acceptance(measured)
        )

    def offer(self, tokens: Sequence[int], most: int) -> Offer:
        """Both, that of a sure lookup first; of an unsure one the other's."""
        drafted = replace(self._other.offer(tokens, most), propose=self._other.propose)
        found = replace(self._lookup.offer(tokens, most), propose=self._lookup.propose)
        if not found.num_tokens:
            return drafted
        if is_sure(found) or not drafted.num_tokens:
            return replace(found, instead=(drafted,))
        return replace(drafted, instead=(found,))

    def propose(self, tokens: Sequence[int], k: int, constraint: Constraint) -> Proposal:
        """By the first offer, where nobody weighed them."""
        propose = self.offer(tokens, k).propose or self._other.propose
        return propose(tokens, k, constraint)

    def rollback(self, length: int) -> None:
        self._lookup.rollback(length)
        self._other.rollback(length)


def is_sure(found: Offer) -> bool:
    """Whether a lookup goes first where no latencies were measured or k is fixed.

    Undisputed, and behind as many tokens that agree as make it likelier to fit than a draft is
    before anything was seen: four or more.
    """
    return prior_of_support(found.support[0]) > PRIOR_ACCEPTANCE
