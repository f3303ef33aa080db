"""How many tokens to draft each round; 0, not speculating, is an answer.

The choice maximises expected committed tokens per second, from the bundle's measured latencies and
the acceptance seen in this sequence. It uses no clock and nothing from other requests, so the same
request on the same bundle plans the same rounds. Sampled tokens depend on the plan (which uniform
decides a token does), hence on the profile: fix `num_draft_tokens` to compare across machines.
"""

from __future__ import annotations

from typing import Protocol

from .acceptance import Acceptance
from .latency import LatencyProfile
from .offer import Offer
from .outcome import Outcome

PROBE_BUDGET = 0.01  # share of the modelled time that trying a draft again may lose
UNKNOWN_HORIZON = 256  # tokens still to come, where max_tokens doesn't say


class Planner(Protocol):
    """Chooses a draft length before each round and hears what came of it."""

    @property
    def longest(self) -> int:
        """The most that it ever chooses: nothing longer need be offered."""

    def choose(self, offer: Offer, remaining: int | None) -> int:
        """At most what is offered; `remaining` tokens may still come."""

    def observe(self, offer: Offer, outcome: Outcome) -> None: ...


class FixedDraftLength:
    """Always k, as far as it is offered."""

    def __init__(self, k: int) -> None:
        self.longest = k

    def choose(self, offer: Offer, remaining: int | None) -> int:
        return min(self.longest, offer.num_tokens)

    def observe(self, offer: Offer, outcome: Outcome) -> None:
        return


class AdaptiveDraftLength:
    """The draft length with the best expected tokens per second.

    Where that is 0 and only drafts teach what they are worth, it tries one now and then, while all
    such tries together have lost at most PROBE_BUDGET of the time spent: the price of noticing that
    the text has changed.
    """

    def __init__(
        self, profile: LatencyProfile, acceptance: Acceptance, max_draft_tokens: int
    ) -> None:
        self.longest = max_draft_tokens
        self._profile = profile
        self._acceptance = acceptance
        # Seconds of a round by k, but for what a draft reads more than one token.
        self._round_s = [profile.round_s(k) for k in range(max_draft_tokens + 1)]
        self._elapsed_s = 0.0  # modelled, not measured: the plan must not depend on the clock
        self._lost_s = 0.0  # by probes
        self._probing = False

    def choose(self, offer: Offer, remaining: int | None) -> int:
        debt_s = self._profile.read_s(offer.unread)
        token_s = self._seconds_per_token(offer)
        k = token_s.index(min(token_s))
        gain_s = (token_s[0] - token_s[k]) * (UNKNOWN_HORIZON if remaining is None else remaining)
        if gain_s < debt_s:
            k = 0
        self._probing = k == 0 and offer.num_tokens > 0 and self._may_probe(debt_s)
        return 1 if self._probing else k

    def observe(self, offer: Offer, outcome: Outcome) -> None:
        self._acceptance.observe(offer, outcome)
        spent_s = self._round_s[outcome.num_drafted]
        if outcome.num_drafted:
            spent_s += self._profile.read_s(offer.unread)
        self._elapsed_s += spent_s
        if self._probing:
            lost_s = spent_s - (outcome.num_accepted + 1) * self._round_s[0]
            self._lost_s = max(0.0, self._lost_s + lost_s)

    def _seconds_per_token(self, offer: Offer) -> list[float]:
        """Expected, by k: a round's seconds over 1 + the chances that its drafts are reached.

        After a full accept the next round's draft reads one token more.
        """
        result, committed = [self._round_s[0]], 1.0
        full_accept_s = self._profile.read_s(2)
        for k, chance in enumerate(self._acceptance.reached(offer), start=1):
            committed += chance
            result.append((self._round_s[k] + chance * full_accept_s) / committed)
        return result

    def _may_probe(self, debt_s: float) -> bool:
        cost_s = self._round_s[1] - self._round_s[0] + debt_s
        within_budget = self._lost_s + cost_s <= PROBE_BUDGET * self._elapsed_s
        return self._acceptance.needs_drafts and within_budget
