"""The target as its own drafter: the same graph, weights and cache, without some of its layers.

Zhang et al. 2023 (Draft & Verify). A draft step is one row through the layers that are kept, then
the sampling tail; nothing of it is held beside the target.

Invariant: drafts write rows of the kept layers behind the committed ones only, at the places of
the last committed token and of the drafts but the last. The round's verification reads the same
tokens at the same places and overwrites all these rows in all layers, so that no row made by a
draft is ever read outside the round that made it. Any q is exact as long as it is what was sampled
from, so the approximate rows cost acceptance and never the law.
"""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import PRIOR_ACCEPTANCE, Acceptance, AcceptanceByPosition
from .buffers import RoundBuffers
from .constraint import Constraint
from .draft_tail import bind_tail
from .drafter import Proposal
from .executor import Executor
from .offer import Offer
from .target import TargetStep


class LayerSkip:
    """k prebound passes through the kept layers, each with the sampling tail behind it."""

    def __init__(self, target: TargetStep, tail: Executor, buffers: RoundBuffers) -> None:
        self._buffers = buffers
        steps = range(buffers.max_draft_tokens)
        self._passes = [target.bind_skipping(buffers.block[:, i + 1 : i + 2]) for i in steps]
        self._tails = [bind_tail(tail, buffers.logits[:, :1], buffers, i) for i in steps]

    @property
    def length(self) -> int:
        """Rows that it wrote, or that were there for it: it has none of its own."""
        return int(self._buffers.draft_lengths[0])

    def acceptance(self, measured: float | None) -> Acceptance:
        prior = PRIOR_ACCEPTANCE if measured is None else measured
        return AcceptanceByPosition(self._buffers.max_draft_tokens, prior)

    def offer(self, tokens: Sequence[int], most: int) -> Offer:
        return Offer(num_tokens=most)

    def rollback(self, length: int) -> None:
        """The rows are the target's, whose length says which are valid."""
        lengths = self._buffers.draft_lengths
        lengths[0] = min(int(lengths[0]), length)

    def propose(self, tokens: Sequence[int], k: int, constraint: Constraint) -> Proposal:
        """x_1 … x_k ~ q, behind the committed `tokens`; the target has read all but the last."""
        lengths, block = self._buffers.draft_lengths, self._buffers.block
        lengths[0] = len(tokens) - 1
        seconds, drafted = 0.0, 0
        while drafted < k and constraint.open_row(drafted):
            seconds += self._passes[drafted].run() + self._tails[drafted].run()
            lengths[0] += 1
            if not constraint.drafted(int(block[0, 2 + drafted])):
                break
            drafted += 1
        return Proposal(num_drafted=drafted, seconds=seconds)
