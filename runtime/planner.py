"""What to draft each round, and how many tokens; 0, not speculating, is an answer.

The choice maximises expected committed tokens per second, from the bundle's measured latencies and
the acceptance seen in this sequence. It uses no clock and nothing from other requests, so the same
request on the same bundle plans the same rounds. Sampled tokens depend on the plan (which uniform
decides a token does), hence on the profile: fix `num_draft_tokens` to compare across machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .acceptance import Acceptance
from .latency import LatencyProfile
from .offer import Offer
from .outcome import Outcome
from .tree_shape import TreeShape

PROBE_BUDGET = 0.01  # share of the modelled time that trying a draft again may lose
UNKNOWN_HORIZON = 256  # tokens still to come, where max_tokens doesn't say


@dataclass(frozen=True, kw_only=True)
class Choice:
    """k drafts of `offer`; the round teaches what the offers passed over were worth, too."""

    offer: Offer
    k: int
    passed: tuple[Offer, ...] = ()
    probing: bool = False  # drafted only to learn
    tree: TreeShape | None = None  # instead of k drafts in a chain


class Planner(Protocol):
    """Chooses what to draft before each round and hears what came of it."""

    @property
    def longest(self) -> int:
        """The most that it ever chooses: nothing longer need be offered."""

    def choose(self, offer: Offer, remaining: int | None) -> Choice:
        """At most what is offered; `remaining` tokens may still come."""

    def observe(self, choice: Choice, outcome: Outcome) -> None: ...


class FixedDraftLength:
    """Always k of what the drafter would rather do, as far as it is offered."""

    def __init__(self, k: int) -> None:
        self.longest = k

    def choose(self, offer: Offer, remaining: int | None) -> Choice:
        return Choice(offer=offer, k=min(self.longest, offer.num_tokens), passed=offer.instead)

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        return


class FixedTree:
    """Always a tree of one shape, as far as the drafter has something to say."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        self.longest = 0  # of a chain: none is offered

    def choose(self, offer: Offer, remaining: int | None) -> Choice:
        return Choice(offer=offer, k=0, tree=self._shape)

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        return


class AdaptiveDraftLength:
    """The offer and the draft length with the best expected tokens per second.

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
        lengths = range(max_draft_tokens + 1)
        self._drafted_round_s = [profile.round_s(k) for k in lengths]
        self._known_round_s = [profile.known_round_s(k) for k in lengths]
        self._plain_s = self._known_round_s[0]
        self._elapsed_s = 0.0  # modelled, not measured: the plan must not depend on the clock
        self._lost_s = 0.0  # by probes
        self._spells = _Spells()

    def choose(self, offer: Offer, remaining: int | None) -> Choice:
        horizon: float = UNKNOWN_HORIZON if remaining is None else remaining
        horizon = min(horizon, self._spells.mean_tokens)
        weighed = [(one, *self._best(one, horizon)) for one in offer.all]
        best, k, gain_s = max(weighed, key=lambda of: of[2])
        return _choice(offer, best, k) if k and gain_s >= 0 else self._plain(offer)

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        self._acceptance.observe(choice.offer, outcome)
        for offer in choice.passed:
            self._acceptance.observe(offer, outcome.undrafted())
        self._spells.observe(choice, outcome)
        spent_s = self._round_s(choice.offer)[outcome.num_drafted]
        if outcome.num_drafted:
            spent_s += self._profile.read_s(choice.offer.unread)
        self._elapsed_s += spent_s
        if choice.probing:
            lost_s = spent_s - (outcome.num_accepted + 1) * self._plain_s
            self._lost_s = max(0.0, self._lost_s + lost_s)

    def _best(self, offer: Offer, horizon: float) -> tuple[int, float]:
        """The best k of one offer, and the seconds that it saves over `horizon` tokens.

        What the draft has to read first is paid once.
        """
        token_s = self._seconds_per_token(offer)
        k = token_s.index(min(token_s))
        return k, (self._plain_s - token_s[k]) * horizon - self._profile.read_s(offer.unread)

    def _seconds_per_token(self, offer: Offer) -> list[float]:
        """Expected, by k: a round's seconds over 1 + the chances that its drafts are reached.

        After a full accept the next round's draft reads one token more.
        """
        round_s, result, committed = self._round_s(offer), [self._plain_s], 1.0
        full_accept_s = 0.0 if offer.known else self._profile.read_s(2)
        for k, chance in enumerate(self._acceptance.reached(offer), start=1):
            committed += chance
            result.append((round_s[k] + chance * full_accept_s) / committed)
        return result

    def _round_s(self, offer: Offer) -> list[float]:
        return self._known_round_s if offer.known else self._drafted_round_s

    def _plain(self, offer: Offer) -> Choice:
        """No drafts, or the one that is tried to learn from."""
        for one in offer.all:
            if one.num_tokens and not one.known and self._may_probe(one):
                return _choice(offer, one, 1, probing=True)
        return _choice(offer, offer, 0)

    def _may_probe(self, offer: Offer) -> bool:
        cost_s = self._drafted_round_s[1] - self._plain_s + self._profile.read_s(offer.unread)
        return self._lost_s + cost_s <= PROBE_BUDGET * self._elapsed_s


class _Spells:
    """How many tokens come between two lookups: so long a draft that has caught up is of use."""

    def __init__(self) -> None:
        self._tokens = float(UNKNOWN_HORIZON)  # as if a first spell had been that long
        self._ended = 0
        self._looked_up = False

    @property
    def mean_tokens(self) -> float:
        return self._tokens / self._ended if self._ended else float("inf")

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        looked_up = choice.k > 0 and choice.offer.known
        if not looked_up:
            self._tokens += len(outcome.tokens)
        self._ended += looked_up and not self._looked_up
        self._looked_up = looked_up


def _choice(offer: Offer, chosen: Offer, k: int, *, probing: bool = False) -> Choice:
    passed = tuple(one for one in offer.all if one is not chosen)
    return Choice(offer=chosen, k=k, passed=passed, probing=probing)
