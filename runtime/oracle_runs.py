"""Runs the oracle's inputs through a bundle's steps, whatever executor is behind them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .accept import AcceptStep
from .buffers import RoundBuffers
from .oracle import CASES, Array, accept_case
from .sampling import SamplingParams

Upload = Callable[[Array], None]  # of what only engines touch otherwise


def accept_decisions(
    step: AcceptStep, buffers: RoundBuffers, ids: Array, upload: Upload = lambda _: None
) -> tuple[Array, Array]:
    """num_accepted and next_token of every case: [CASES] i64 each; none where nothing drafts."""
    cases = CASES if buffers.max_draft_tokens else 0
    accepted, tokens = np.zeros(cases, np.int64), np.zeros(cases, np.int64)
    for index in range(cases):
        _fill(buffers, index, ids)
        upload(buffers.logits)
        upload(buffers.draft_probs)
        step.decide(_k(index, buffers))
        accepted[index], tokens[index] = buffers.num_accepted[0], buffers.next_token[0]
    return accepted, tokens


def _k(index: int, buffers: RoundBuffers) -> int:
    return 1 + index % buffers.max_draft_tokens


def _fill(buffers: RoundBuffers, index: int, ids: Array) -> None:
    case = accept_case(index, buffers.max_draft_tokens, buffers.logits.shape[2], ids)
    params = SamplingParams(temperature=case.temperature, top_k=case.top_k, top_p=case.top_p)
    buffers.sampling.begin(params, ())
    buffers.logits[:, : case.k + 1] = case.logits
    buffers.drafts(case.k)[:] = case.draft_tokens
    buffers.draft_probs[:, : case.k] = case.draft_probs
    buffers.set_drawn(case.k)
    buffers.accept_uniforms[:, : case.k] = case.accept_uniforms
    buffers.draw_uniforms[:, : case.k + 1] = case.draw_uniforms


def draft_ids(size: int, d2t: Array | None) -> Array:
    """The target's id of each draft token: [size] i64."""
    own = np.arange(size, dtype=np.int64)
    return own if d2t is None else own + d2t
