"""What a drafter says that it could propose, before anything is spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .drafter import Propose


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Up to `num_tokens` drafts.

    A lookup knows them beforehand: `tokens`, and the `support` of each, which is how many tokens in
    front of it agree with where it was found, provided that the drafts before it fit. Of what is
    known beforehand it shows for free whether it fits, drafted or not.
    """

    num_tokens: int
    unread: int = 1  # tokens that a model reads before drafting, the last committed one included
    tokens: Sequence[int] = ()
    support: Sequence[int] = ()
    propose: Propose | None = None  # makes it good; None: the drafter's own `propose`
    instead: tuple[Offer, ...] = ()  # what the drafter could do in the same place as well

    @property
    def known(self) -> bool:
        """Whether the drafts stand already: proposing them costs nothing."""
        return bool(self.tokens)

    @property
    def all(self) -> tuple[Offer, ...]:
        """This one, which is taken where nobody weighs them, and what may be had instead."""
        return (self, *self.instead)


NO_OFFER = Offer(num_tokens=0)
