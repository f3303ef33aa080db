"""How many tokens to draft each round; 0, not speculating, is an answer.

The choice maximises expected committed tokens per second, from the bundle's measured latencies and
the acceptance seen in this sequence. It uses no clock and nothing from other requests, so the same
request on the same bundle plans the same rounds. Sampled tokens depend on the plan (which uniform
decides a token does), hence on the profile: fix `num_draft_tokens` to compare across machines.
"""

from __future__ import annotations

from typing import Protocol

from .acceptance import AcceptanceEstimate
from .latency import LatencyProfile

PROBE_BUDGET = 0.01  # share of the modelled time that trying a draft again may lose
UNKNOWN_HORIZON = 256  # tokens still to come, where max_tokens doesn't say


class Planner(Protocol):
    """Chooses a draft length before each round and hears what came of it."""

    def choose(self, room: int, unread: int, remaining: int | None) -> int:
        """At most `room`; the draft has `unread` tokens to read, `remaining` may still come."""

    def observe(self, num_drafted: int, num_accepted: int) -> None: ...


class FixedDraftLength:
    """Always k, as far as there is room."""

    def __init__(self, k: int) -> None:
        self._k = k

    def choose(self, room: int, unread: int, remaining: int | None) -> int:
        return min(self._k, room)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        return


class AdaptiveDraftLength:
    """The draft length with the best expected tokens per second.

    Where that is 0 it tries one draft now and then, only while all such tries together have lost
    at most PROBE_BUDGET of the time spent: the price of noticing that the text has changed.
    """

    def __init__(self, profile: LatencyProfile, estimate: AcceptanceEstimate) -> None:
        self._profile = profile
        self._estimate = estimate
        # Seconds of a round by k, but for what a draft reads more than one token.
        self._round_s = [profile.round_s(k) for k in range(estimate.max_draft_tokens + 1)]
        self._elapsed_s = 0.0  # modelled, not measured: the plan must not depend on the clock
        self._lost_s = 0.0  # by probes
        self._debt_s = 0.0  # reading what the draft has not read, this round
        self._probing = False

    def choose(self, room: int, unread: int, remaining: int | None) -> int:
        self._debt_s = self._profile.read_s(unread)
        token_s = self._seconds_per_token(room)
        k = token_s.index(min(token_s))
        gain_s = (token_s[0] - token_s[k]) * (UNKNOWN_HORIZON if remaining is None else remaining)
        if gain_s < self._debt_s:
            k = 0
        self._probing = k == 0 and room > 0 and self._may_probe()
        return 1 if self._probing else k

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        spent_s = self._round_s[num_drafted]
        if num_drafted:
            self._estimate.observe(num_drafted, num_accepted)
            spent_s += self._debt_s
        self._elapsed_s += spent_s
        if self._probing:
            lost_s = spent_s - (num_accepted + 1) * self._round_s[0]
            self._lost_s = max(0.0, self._lost_s + lost_s)

    def _seconds_per_token(self, room: int) -> list[float]:
        """Expected, by k: a round's seconds over 1 + the chances that its drafts are reached.

        After a full accept the next round's draft reads one token more.
        """
        result, committed = [self._round_s[0]], 1.0
        full_accept_s = self._profile.read_s(2)
        for k, chance in enumerate(self._estimate.reached()[:room], start=1):
            committed += chance
            result.append((self._round_s[k] + chance * full_accept_s) / committed)
        return result

    def _may_probe(self) -> bool:
        cost_s = self._round_s[1] - self._round_s[0] + self._debt_s
        return self._lost_s + cost_s <= PROBE_BUDGET * self._elapsed_s
