"""Rounds that are launched whole where they can be, and taken step by step elsewhere.

Invariant: whichever way a round went, lengths and caches are left as the steps would leave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from .accept import AcceptStep
from .buffers import RoundBuffers
from .captured_round import CapturedRounds, RoundInputs
from .draft_model import DraftModel
from .drafter import Propose
from .matcher import Matcher
from .outcome import Outcome
from .round import Rounds
from .sampling import SamplingParams
from .target import TargetStep
from .tree_shape import Brancher


class WholeRounds(Rounds):
    """Adjusted logits, grammars and bans need the host between the steps; such rounds take them.

    So do trees: what their drafts are is the host's decision.
    """

    def __init__(
        self,
        buffers: RoundBuffers,
        target: TargetStep,
        drafter: DraftModel,
        accept: AcceptStep,
        captured: CapturedRounds,
        max_context: int,
        brancher: Brancher | None = None,
    ) -> None:
        super().__init__(buffers, target, drafter, accept, brancher)
        self.captured = captured
        self._model = drafter
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
        if propose is not None or not self._is_whole(tokens, k):
            return super().run(tokens, k, uniforms, propose)
        self._model.catch_up(tokens, k)
        window, committed = self._model.window, len(tokens)
        inputs = RoundInputs(
            tokens=tokens,
            draft_rows=committed - 2 - window.base,
            uniforms=uniforms,
            params=self._params,
        )
        outcome = self.captured.run(inputs, k)
        window.rows = committed - window.base + k - 1
        self.target.length = committed + outcome.num_accepted
        self._model.rollback(self.target.length)
        return outcome

    def _is_whole(self, tokens: list[int], k: int) -> bool:
        adjusted = bool(self.buffers.sampling.shared["adjust"][0])
        fits = len(tokens) >= 2 and len(tokens) + k <= self._max_context
        return k > 0 and fits and not adjusted and not self.constraint.active
