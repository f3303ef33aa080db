"""Medusa heads as drafter: k drafts from one hidden state, none of which knows the others.

Head i predicts the token at t + 2 + i from the target's state at t, behind its last norm (Medusa,
arXiv 2401.10774, section 3.1). With C tokens committed the target's last state is that at C - 2, so
head 0 gives the first draft. One call computes all heads' logits; each draft is then sampled by the
tail, so that penalties and masks see the drafts before it.

Invariant: what it drafts depends on the target's features and on nothing of earlier rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .acceptance import PRIOR_ACCEPTANCE, Acceptance, AcceptanceByPosition
from .buffers import RoundBuffers
from .constraint import Constraint
from .draft_tail import bind_tail
from .drafter import Proposal
from .executor import Executor
from .features import FeatureStore
from .offer import NO_OFFER, Offer

Array = NDArray[Any]


class MedusaDrafter:
    """The heads over the target's features and the shared round buffers."""

    def __init__(
        self,
        heads: Executor,
        tail: Executor,
        features: FeatureStore,
        buffers: RoundBuffers,
        num_heads: int,
    ) -> None:
        self.features = features
        self._buffers = buffers
        self._length = 0
        self._state: Array = np.zeros((1, 1, features.width), np.float32)
        #: [1, num_heads, head_vocab]: of the state that was read last
        self.logits: Array = np.zeros((1, num_heads, heads.axes["head_vocab"]), np.float32)
        logits = self.logits
        self._heads = heads.bind({"features": self._state}, {"head_logits": logits})
        steps = range(min(num_heads, buffers.max_draft_tokens))
        self._tails = [bind_tail(tail, logits[:, i : i + 1], buffers, i) for i in steps]

    @property
    def length(self) -> int:
        """As far as the target's states that it last read reach."""
        return self._length

    def acceptance(self, measured: float | None) -> Acceptance:
        prior = PRIOR_ACCEPTANCE if measured is None else measured
        return AcceptanceByPosition(self._buffers.max_draft_tokens, prior)

    def offer(self, tokens: Sequence[int], most: int) -> Offer:
        if len(tokens) < 2:  # the target has no state yet
            return NO_OFFER
        return Offer(num_tokens=min(most, len(self._tails)))

    def rollback(self, length: int) -> None:
        """The states are the target's, whose length says which count."""
        self._length = min(self._length, length)

    def has_read(self, length: int) -> None:
        """A round that was launched whole began at the state of row `length` - 1."""
        self._length = length

    def read(self, tokens: Sequence[int]) -> float:
        """All heads on the target's last state; returns the seconds."""
        self._length = len(tokens) - 1
        self.features.copy(len(tokens) - 2, self._state)
        return self._heads.run()

    def propose(self, tokens: Sequence[int], k: int, constraint: Constraint) -> Proposal:
        """x_1 … x_k ~ q, behind the committed `tokens`."""
        wanted = self.offer(tokens, k).num_tokens
        if not wanted or not constraint.open_row(0):
            return Proposal(num_drafted=0, seconds=0.0)
        seconds, drafted = self.read(tokens), 0
        while drafted < wanted and constraint.open_row(drafted):
            seconds += self._tails[drafted].run()
            if not constraint.drafted(int(self._buffers.block[0, 2 + drafted])):
                break  # the heads' vocabulary has no token that may follow
            drafted += 1
        return Proposal(num_drafted=drafted, seconds=seconds)
