"""What has been seen of acceptance so far, as the chance that a draft at each position fits."""

from __future__ import annotations

PRIOR_ACCEPTANCE = 0.6  # before anything was seen; a usual value for a small trained draft
PRIOR_WEIGHT = 6.0  # evaluations that the prior counts for
POSITION_WEIGHT = 8.0  # evaluations that the pooled estimate counts for at one position
DECAY = 0.98  # per round that drafted: remembers about 50, since text changes its kind


class AcceptanceEstimate:
    """Decayed counts per draft position, each shrunk to the pooled rate, that to the prior.

    A position is evaluated when all drafts before it were accepted, so its rate is conditional.
    """

    def __init__(self, max_draft_tokens: int, prior: float = PRIOR_ACCEPTANCE) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._prior = prior
        self._evaluated = [0.0] * max_draft_tokens
        self._accepted = [0.0] * max_draft_tokens

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        for i in range(len(self._evaluated)):
            self._evaluated[i] *= DECAY
            self._accepted[i] *= DECAY
        for i in range(min(num_accepted + 1, num_drafted)):
            self._evaluated[i] += 1
            self._accepted[i] += i < num_accepted

    def reached(self) -> list[float]:
        """For each k ≥ 1: the chance that all of the first k drafts are accepted."""
        pooled = self._pooled()
        result, chance = [], 1.0
        for evaluated, accepted in zip(self._evaluated, self._accepted, strict=True):
            chance *= (POSITION_WEIGHT * pooled + accepted) / (POSITION_WEIGHT + evaluated)
            result.append(chance)
        return result

    def _pooled(self) -> float:
        evaluated, accepted = sum(self._evaluated), sum(self._accepted)
        return (PRIOR_WEIGHT * self._prior + accepted) / (PRIOR_WEIGHT + evaluated)
