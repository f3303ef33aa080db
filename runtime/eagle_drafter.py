"""An EAGLE head as drafter: it reads the target's states, then lives on its own for k steps.

Pair i is the token at i + 1 with the state at i; its row says what follows at i + 2. With C tokens
committed the target has states up to C - 2, so the pairs up to C - 2 are read from those, all that
are new in one call, and the last of them gives the first draft. Each further step pairs the draft
with the state that the head itself gave last (EAGLE-3: arXiv 2503.01840, section 3.1; EAGLE-1:
arXiv 2401.15077, section 4.1).

Invariant: between rounds the cache's valid rows are of pairs whose state is the target's. The rows
of a round's own steps lie behind them and are forgotten when the round ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .acceptance import PRIOR_ACCEPTANCE, Acceptance, AcceptanceByPosition
from .buffers import RoundBuffers
from .constraint import Constraint
from .contract import CacheSpec
from .draft_window import DraftWindow
from .drafter import Proposal
from .executor import Call, Executor, cache_buffers
from .features import FeatureStore
from .offer import NO_OFFER, Offer

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The calls that read some pairs at once: join their features, then one step of the head."""

    token_ids: Array  # [1, pairs]
    features: Array  # [1, pairs, feature_width]
    fuse: Call | None  # None: the features are the states
    step: Call

    def run(self) -> float:
        return (self.fuse.run() if self.fuse else 0.0) + self.step.run()


class EagleDrafter:
    """The head's graph over its own cache, the target's features and the shared round buffers."""

    def __init__(
        self,
        head: Executor,
        fuse: Executor | None,
        cache: CacheSpec,
        features: FeatureStore,
        buffers: RoundBuffers,
        state_width: int,
    ) -> None:
        self._head = head
        self._fuse = fuse
        self.state_width = state_width
        self.features = features
        self._buffers = buffers
        self.window = DraftWindow(buffers.draft_lengths, cache.max_context)
        self.caches = cache_buffers(cache.past(), cache.shape(1))
        names = zip(cache.past(), cache.present(), strict=True)
        self.present = {present.name: self.caches[past.name] for past, present in names}
        size = self.window.size
        self._token_ids = np.zeros((1, size), np.int64)
        self._read_features = np.zeros((1, size, features.width), np.float32)
        self._fused = np.zeros((1, size, state_width), np.float32) if fuse else self._read_features
        # A step reads one and writes the other.
        self._states = [np.zeros((1, 1, state_width), np.float32) for _ in range(2)]
        most = min(buffers.max_draft_tokens + 1, size)  # a round commits so many
        self._reads = {pairs: self._bind_read(pairs) for pairs in range(1, most + 1)}
        self._steps = [self._bind_step(i) for i in range(1, buffers.max_draft_tokens)]

    @property
    def length(self) -> int:
        """Pair i - 1 is the last that has token i."""
        return self.window.end + 1 if self.window.end else 0

    def acceptance(self, measured: float | None) -> Acceptance:
        prior = PRIOR_ACCEPTANCE if measured is None else measured
        return AcceptanceByPosition(self._buffers.max_draft_tokens, prior)

    def offer(self, tokens: Sequence[int], most: int) -> Offer:
        unread = min(len(tokens) - 1 - self.window.end, self.window.size)
        if unread < 1:  # one token has no pair
            return NO_OFFER
        return Offer(num_tokens=min(most, self.window.most_drafts), unread=unread)

    def rollback(self, length: int) -> None:
        self.window.rollback(max(0, length - 1))

    def propose(self, tokens: Sequence[int], k: int, constraint: Constraint) -> Proposal:
        """x_1 … x_k ~ q, behind the committed `tokens`."""
        pairs = len(tokens) - 1
        self.window.make_room(pairs, k)
        block, drafted, seconds, read = self._buffers.block, 0, 0.0, self.window.rows
        while pairs and drafted < k and constraint.open_row(drafted):
            if drafted == 0:
                seconds += self._read(tokens[self.window.end + 1 :])
                read = self.window.rows
            else:
                seconds += self._steps[drafted - 1].run()
                self.window.rows += 1
            if not constraint.drafted(int(block[0, 2 + drafted])):
                break  # the head's vocabulary has no token that may follow
            drafted += 1
        self.window.rows = read
        return Proposal(num_drafted=drafted, seconds=seconds)

    def catch_up(self, tokens: Sequence[int], k: int) -> bool:
        """Have read all but the pairs of the last k + 1 tokens at most, with room for k drafts; no
        where the cache holds fewer pairs behind its window's start than that."""
        pairs = len(tokens) - 1
        self.window.make_room(pairs, k)
        first = pairs - (k + 1)  # that a round of k drafts reads itself
        if first < self.window.base:
            return False
        if self.window.end < first:
            self._read(tokens[self.window.end + 1 : first + 1])
        return True

    def states(self, start: int, count: int) -> tuple[Array, float]:
        """The states of the target's rows from `start`, joined, and the seconds: [1, count, H]."""
        call = self._reading(count)
        self.features.copy(start, call.features)
        return self._fused[:, :count], call.fuse.run() if call.fuse else 0.0

    def _reading(self, count: int) -> _Read:
        if count not in self._reads:
            self._reads[count] = self._bind_read(count)
        return self._reads[count]

    def _read(self, token_ids: Sequence[int]) -> float:
        """Read the pairs of these tokens, the last ones committed, and draft one token."""
        count = len(token_ids)
        call = self._reading(count)
        call.token_ids[0] = token_ids
        self.features.copy(self.window.end, call.features)
        seconds = call.run()
        self.window.rows += count
        return seconds

    def _bind_read(self, pairs: int) -> _Read:
        token_ids, features = self._token_ids[:, :pairs], self._read_features[:, :pairs]
        states, fuse = self._fused[:, :pairs], None
        if self._fuse:
            fuse = self._fuse.bind({"features": features}, {"states": states})
        step = self._bind(token_ids, states, 0)
        return _Read(token_ids=token_ids, features=features, fuse=fuse, step=step)

    def _bind_step(self, step: int) -> Call:
        previous = self._buffers.block[:, step + 1 : step + 2]
        return self._bind(previous, self._states[(step - 1) % 2], step)

    def _bind(self, token_ids: Array, states: Array, step: int) -> Call:
        buffers = self._buffers
        sampling = buffers.sampling
        inputs: dict[str, Array] = {
            "input_ids": token_ids,
            "states": states,
            "past_lengths": buffers.draft_lengths,
            "draft_uniforms": buffers.draft_uniforms[step : step + 1],
            "drafted_tokens": buffers.drafts(step),
            "allowed_tokens": sampling.allowed[:, step : step + 1],
            **sampling.shared,
            **self.caches,
        }
        outputs: dict[str, Array] = {
            "draft_token": buffers.block[:, step + 2 : step + 3],
            "draft_step_probs": buffers.draft_probs[:, step : step + 1],
            "next_state": self._states[step % 2],
            **self.present,
        }
        return self._head.bind(inputs, outputs)
