"""A whole round of Medusa's heads as one program: heads, k draws, verify, accept.

As `runtime.captured_head`, whose way with the target's states it shares: the heads read the last of
them, and nothing of earlier rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .captured_calls import Binds, Bound
from .captured_head import StateEngines, StateProgram


@dataclass(frozen=True, kw_only=True)
class MedusaEngines(StateEngines):
    """`draft` is the tail, which draws one token from a head's logits; it has no caches."""

    heads: Binds
    num_heads: int
    head_vocab: int


class MedusaProgram(StateProgram):
    """Of one number of drafts and one context bucket."""

    _engines: MedusaEngines

    @staticmethod
    def leading(drafts: int) -> int:
        return 1

    def _before(self) -> list[Bound]:
        engines = self._engines
        self._head_logits = np.zeros((1, engines.num_heads, engines.head_vocab), np.float32)
        features = {"features": self.arena["read_features"]}
        return [engines.heads.bind(features, {"head_logits": self._head_logits})]

    def _draft(self, step: int) -> Bound:
        a, end = self.arena, self.lead + step
        inputs = {
            "logits": self._head_logits[:, step : step + 1],
            "draft_uniforms": a["draft_uniforms"][step : step + 1],
            "drafted_tokens": a["block"][:, self.lead : end],
            "allowed_tokens": self.decision.allowed(1),
            **self.decision.sampling(),
        }
        outputs = {
            "draft_token": a["block"][:, end : end + 1],
            "draft_step_probs": self.decision.q[:, step : step + 1],
        }
        return self._engines.draft.bind(inputs, outputs)
