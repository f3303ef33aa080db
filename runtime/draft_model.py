"""A draft model as drafter: k prebound steps, each feeding the next without a copy on the host.

Invariant: the draft cache holds rows of committed tokens only, a run of them that ends where
`length` says. Between rounds that is all committed tokens but the last, one fewer after a full
accept (the last draft was never read), and any number fewer after rounds that did not draft;
`propose` catches up first.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from .offer import Offer


class DraftModel:
    """The draft graph over its own cache and the shared round buffers."""

    def __init__(self, executor: Executor, cache: CacheSpec, buffers: RoundBuffers) -> None:
        self._executor = executor
        self._buffers = buffers
        self.window = DraftWindow(buffers.draft_lengths, cache.max_context)
        self.caches = cache_buffers(cache.past(), cache.shape(1))
        names = zip(cache.past(), cache.present(), strict=True)
        self.present = {present.name: self.caches[past.name] for past, present in names}
        self._chunk = np.zeros((1, self.window.size), np.int64)
        self._unused_token = np.zeros((1, 1), np.int64)
        self._unused_probs = np.zeros((1, 1, buffers.draft_probs.shape[2]), np.float32)
        self._catch_up_calls: dict[int, Call] = {}
        steps = range(buffers.max_draft_tokens)
        self._steps = [self._bind_step(i, buffers.block[:, i + 1 : i + 2]) for i in steps]
        # The first step after a full accept reads two tokens: the one it lacks and the last.
        self._first_of_two = self._bind_step(0, buffers.block[:, :2])

    @property
    def length(self) -> int:
        return self.window.end

    def acceptance(self, measured: float | None) -> Acceptance:
        prior = PRIOR_ACCEPTANCE if measured is None else measured
        return AcceptanceByPosition(self._buffers.max_draft_tokens, prior)

    def offer(self, tokens: Sequence[int], most: int) -> Offer:
        unread = min(len(tokens) - self.length, self.window.size)
        return Offer(num_tokens=min(most, self.window.most_drafts), unread=unread)

    def rollback(self, length: int) -> None:
        self.window.rollback(length)

    def propose(self, tokens: Sequence[int], k: int, constraint: Constraint) -> Proposal:
        """x_1 … x_k ~ q, behind the committed `tokens`."""
        seconds = self.catch_up(tokens, k)
        unread = len(tokens) - self.length
        block, drafted = self._buffers.block, 0
        while drafted < k and constraint.open_row(drafted):
            first_of_two = drafted == 0 and unread == 2
            seconds += (self._first_of_two if first_of_two else self._steps[drafted]).run()
            self.window.rows += 1 if drafted else unread
            if not constraint.drafted(int(block[0, 2 + drafted])):
                break  # the draft's vocabulary has no token that may follow
            drafted += 1
        return Proposal(num_drafted=drafted, seconds=seconds)

    def catch_up(self, tokens: Sequence[int], k: int) -> float:
        """Have read all but the last two of them at most, with room for k more; takes seconds."""
        self.window.make_room(len(tokens), k)
        return self._catch_up(tokens[self.length : -2])

    def _catch_up(self, tokens: Sequence[int]) -> float:
        """Read all but the last two tokens, whose step follows."""
        count = len(tokens)
        if not count:
            return 0.0
        call = self._catch_up_calls.get(count)
        if call is None:
            outputs = (self._unused_token, self._unused_probs)
            call = self._bind(self._chunk[:, :count], np.zeros((1,), np.float32), *outputs)
            self._catch_up_calls[count] = call
        self._chunk[0, :count] = tokens
        seconds = call.run()
        self.window.rows += count
        return seconds

    def _bind_step(self, step: int, input_ids: NDArray[Any]) -> Call:
        buffers = self._buffers
        return self._bind(
            input_ids,
            buffers.draft_uniforms[step : step + 1],
            buffers.block[:, step + 2 : step + 3],
            buffers.draft_probs[:, step : step + 1],
            step,
        )

    def _bind(
        self,
        input_ids: NDArray[Any],
        uniform: NDArray[Any],
        token: NDArray[Any],
        probs: NDArray[Any],
        step: int = 0,
    ) -> Call:
        sampling = self._buffers.sampling
        inputs = {
            "input_ids": input_ids,
            "past_lengths": self._buffers.draft_lengths,
            "draft_uniforms": uniform,
            "drafted_tokens": self._buffers.drafts(step),
            "allowed_tokens": sampling.allowed[:, step : step + 1],
            **sampling.shared,
            **self.caches,
        }
        outputs = {"draft_token": token, "draft_step_probs": probs, **self.present}
        return self._executor.bind(inputs, outputs)
