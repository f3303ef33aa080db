"""Rounds that are launched whole where they can be, and taken step by step elsewhere.

Invariant: whichever way a round went, lengths and caches are left as the steps would leave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from .accept import AcceptStep
from .buffers import RoundBuffers
from .captured_round import CapturedRounds
from .captured_tree import CapturedTrees
from .drafter import Drafter, Propose
from .matcher import Matcher
from .outcome import Outcome
from .round import Rounds
from .sampling import SamplingParams
from .target import TargetStep
from .tree_shape import Brancher
from .whole_chain import prepared, settle


class WholeRounds(Rounds):
    """Adjusted logits, grammars and bans need the host between the steps; such rounds take them.

    Of trees the host decides what their drafts are; what follows, verification and acceptance, is
    one launch.
    """

    def __init__(
        self,
        buffers: RoundBuffers,
        target: TargetStep,
        drafter: Drafter | None,
        accept: AcceptStep,
        brancher: Brancher | None = None,
        *,
        captured: CapturedRounds | None,
        trees: CapturedTrees | None,
        max_context: int,
    ) -> None:
        """captured: of a draft model or heads beside the target; None: chains take the steps."""
        super().__init__(buffers, target, drafter, accept, brancher)
        self.captured = captured
        self.trees = trees
        self._max_context = max_context
        self._params = SamplingParams()

    def begin(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        eos_token_ids: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self._params = params
        super().begin(params, prompt, eos_token_ids=eos_token_ids, matcher=matcher)

    def run(
        self, tokens: list[int], k: int, uniforms: NDArray[Any], propose: Propose | None = None
    ) -> Outcome:
        if self.captured is None or propose is not None or not self._is_whole(tokens, k):
            return super().run(tokens, k, uniforms, propose)
        inputs = prepared(self.drafter, tokens, k, uniforms, self._params)
        if inputs is None or self.drafter is None:
            return super().run(tokens, k, uniforms)
        outcome = self.captured.run(inputs, k)
        settle(self.drafter, len(tokens), k)
        self.target.length = len(tokens) + outcome.num_accepted
        self.drafter.rollback(self.target.length)
        return outcome

    def _decide_tree(self, size: int) -> tuple[float, float]:
        if self.trees is None or not size or not self._is_free:
            return super()._decide_tree(size)
        return self.trees.decide(size), 0.0  # one piece: its parts can't be told apart

    def _is_whole(self, tokens: list[int], k: int) -> bool:
        fits = len(tokens) >= 2 and len(tokens) + k <= self._max_context
        return k > 0 and fits and self._is_free

    @property
    def _is_free(self) -> bool:
        """Whether no table of the host's is read between the steps."""
        return not (self.buffers.sampling.shared["adjust"][0] or self.constraint.active)
