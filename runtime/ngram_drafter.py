"""Prompt lookup as a drafter: what followed the text's last tokens when they stood there before.

It needs no engine. q is one-hot, the draft's certain choice, so the rule that accepts and the draw
of a recovered token are the same as for a model, and exact under sampling, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from .acceptance import Acceptance, AcceptanceBySupport
from .buffers import RoundBuffers
from .certain import write_certain
from .constraint import Constraint
from .drafter import Proposal
from .ngram_index import Match, NgramIndex
from .offer import NO_OFFER, Offer


class NgramDrafter:
    """Proposes from an index of the committed tokens."""

    def __init__(self, index: NgramIndex, buffers: RoundBuffers) -> None:
        self.index = index
        self._buffers = buffers

    @property
    def length(self) -> int:
        return self.index.length

    def acceptance(self, measured: float | None) -> Acceptance:
        return AcceptanceBySupport()

    def offer(self, tokens: Sequence[int], most: int) -> Offer:
        """What stands behind the latest place of the longest ending.

        A place nearer than `most` tokens is a text that repeats: it is taken to go on doing so.
        """
        match = self._find(tokens)
        if match is None:
            return NO_OFFER
        end, period = match.end, len(tokens) - match.end
        drafts = [tokens[end + i % period] for i in range(most)]
        support = list(range(match.length, match.length + most))
        if match.disputed:
            support[0] = 0  # who says that it's this time's?
        return Offer(num_tokens=most, tokens=drafts, support=support)

    def propose(self, tokens: Sequence[int], k: int, constraint: Constraint) -> Proposal:
        start = perf_counter()
        count = write_certain(self.offer(tokens, k).tokens, self._buffers, constraint)
        return Proposal(num_drafted=count, seconds=perf_counter() - start, drawn=False)

    def rollback(self, length: int) -> None:
        self.index.rollback(length)

    def _find(self, tokens: Sequence[int]) -> Match | None:
        self.index.extend(tokens[self.index.length :])
        return self.index.find()
