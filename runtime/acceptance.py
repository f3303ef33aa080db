"""What has been seen of acceptance so far, as the chance that each draft of an offer fits."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Protocol

from .offer import Offer
from .outcome import Outcome

PRIOR_ACCEPTANCE = 0.6  # before anything was seen; a usual value for a small trained draft
PRIOR_WEIGHT = 6.0  # evaluations that the prior counts for
POSITION_WEIGHT = 8.0  # evaluations that the pooled estimate counts for at one position
DECAY = 0.98  # per round that taught something: remembers about 50, since text changes its kind

MOST_SUPPORT = 16  # tokens; more are no better evidence


class Acceptance(Protocol):
    """Learns within one request and knows nothing of others."""

    def reached(self, offer: Offer) -> list[float]:
        """For each k ≥ 1 up to the offer's: the chance that its first k drafts are accepted."""

    def observe(self, offer: Offer, outcome: Outcome) -> None:
        """Learn from what a round made of an offer; one not taken has an undrafted outcome."""


class _Counts:
    """Decayed counts of trials and hits, by class."""

    def __init__(self, classes: int) -> None:
        self.trials = [0.0] * classes
        self.hits = [0.0] * classes

    def decay(self) -> None:
        for i in range(len(self.trials)):
            self.trials[i] *= DECAY
            self.hits[i] *= DECAY

    def add(self, i: int, hit: bool) -> None:
        self.trials[i] += 1
        self.hits[i] += hit

    def rate(self, i: int, prior: float, weight: float) -> float:
        """The share of hits, the prior counting for `weight` trials."""
        return (weight * prior + self.hits[i]) / (weight + self.trials[i])


class AcceptanceByPosition:
    """A draft model's: a rate for each position, shrunk to the pooled one, that to the prior.

    A position is evaluated when all drafts before it were accepted, so its rate is conditional.
    """

    def __init__(self, max_draft_tokens: int, prior: float = PRIOR_ACCEPTANCE) -> None:
        self._prior = prior
        self._counts = _Counts(max_draft_tokens)

    def observe(self, offer: Offer, outcome: Outcome) -> None:
        if not outcome.num_drafted:
            return
        self._counts.decay()
        for i in range(min(outcome.num_accepted + 1, outcome.num_drafted)):
            self._counts.add(i, i < outcome.num_accepted)

    def reached(self, offer: Offer) -> list[float]:
        counts, pooled = self._counts, self._pooled()
        rates = (counts.rate(i, pooled, POSITION_WEIGHT) for i in range(offer.num_tokens))
        return list(accumulate(rates, mul))

    def _pooled(self) -> float:
        trials, hits = sum(self._counts.trials), sum(self._counts.hits)
        return (PRIOR_WEIGHT * self._prior + hits) / (PRIOR_WEIGHT + trials)


class AcceptanceBySupport:
    """A lookup's: a rate for each support, whatever the position.

    A draft behind i accepted ones has i tokens more that agree with where it was found, so its
    chance is that of a longer match. Plain rounds teach as much as drafted ones: the offer is known
    beforehand, and a token drawn from p equals a draft with just the chance that the draft would be
    accepted with, q being one-hot.
    """

    def __init__(self) -> None:
        self._counts = _Counts(MOST_SUPPORT + 1)

    def observe(self, offer: Offer, outcome: Outcome) -> None:
        if not offer.tokens:
            return
        self._counts.decay()
        for token, draft, support in zip(outcome.tokens, offer.tokens, offer.support, strict=False):
            self._counts.add(min(support, MOST_SUPPORT), token == draft)
            if token != draft:
                break

    def reached(self, offer: Offer) -> list[float]:
        return list(accumulate(map(self._rate, offer.support), mul))

    def _rate(self, support: int) -> float:
        support = min(support, MOST_SUPPORT)
        return self._counts.rate(support, prior_of_support(support), PRIOR_WEIGHT)


class AcceptanceOfEither:
    """Of a drafter that looks up or drafts: each way learns apart, from its own offers."""

    def __init__(self, *, known: Acceptance, drafted: Acceptance) -> None:
        self._known = known
        self._drafted = drafted

    def observe(self, offer: Offer, outcome: Outcome) -> None:
        self._of(offer).observe(offer, outcome)

    def reached(self, offer: Offer) -> list[float]:
        return self._of(offer).reached(offer)

    def _of(self, offer: Offer) -> Acceptance:
        return self._known if offer.known else self._drafted


def prior_of_support(support: int) -> float:
    """Before anything was seen: a text that repeats itself for s tokens goes on with 1 − 1.3/s.

    Fits what SmolLM2-135M-Instruct wrote, greedily and at temperature 0.8 (156,000 tokens).
    """
    return 1 - 1.3 / support if support > 1 else 0.0
