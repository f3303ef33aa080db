"""The end of a draft step behind logits that another graph made: transforms, one token and q."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from .buffers import RoundBuffers
from .executor import Call, Executor

Array = NDArray[Any]


def bind_tail(tail: Executor, logits: Array, buffers: RoundBuffers, step: int) -> Call:
    """Draft number `step` of a round from `logits` [1, 1, draft_vocab] f32."""
    sampling = buffers.sampling
    inputs: dict[str, Array] = {
        "logits": logits,
        "draft_uniforms": buffers.draft_uniforms[step : step + 1],
        "drafted_tokens": buffers.drafts(step),
        "allowed_tokens": sampling.allowed[:, step : step + 1],
        **sampling.shared,
    }
    outputs: dict[str, Array] = {
        "draft_token": buffers.block[:, step + 2 : step + 3],
        "draft_step_probs": buffers.draft_probs[:, step : step + 1],
    }
    return tail.bind(inputs, outputs)
