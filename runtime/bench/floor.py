"""What the runtime adds to the engine: a plain step against the bare run of the same graph.

The bare run is `run_with_iobinding` on a session of its own, bound once, in a loop with nothing in
between, at the same context length and with the same options. Both alternate in short blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..contract import target_graph
from ..decoder import Decoder
from ..executor import Call, EngineOptions, Executor, cache_buffers
from ..sampling import SamplingParams
from ..tree_buffers import chain_inputs

CONTEXT = 64  # tokens in the cache when a block begins
BLOCK = 16  # steps a block


@dataclass(frozen=True, kw_only=True)
class StepFloor:
    """Medians in seconds at query length 1; the ratios are over `bare_s`."""

    bundle: str
    context: int
    num_steps: int
    bare_s: float  # session run with bound buffers
    target_step_s: float  # the target's call within a round
    round_s: float  # the whole plain round: target, accept and orchestration
    target_step_ratio: float
    round_ratio: float


def measure_floor(
    name: str, bundle: Bundle, decoder: Decoder, options: EngineOptions, blocks: int
) -> StepFloor:
    """Alternate `blocks` blocks of bare runs and of plain decoding."""
    max_context = bundle.manifest.limits.max_context
    context = min(CONTEXT, max_context // 2)
    steps = min(BLOCK, max_context - context - 1)
    call = _bare_call(bundle, context + steps // 2, options)
    vocab = bundle.manifest.target.vocab_size
    bare: list[float] = []
    target: list[float] = []
    rounds: list[float] = []
    for block in range(blocks + 1):
        times = [call.run() for _ in range(steps)]
        calls, whole = _plain_block(decoder, context, steps, vocab)
        if block:  # the first only warms up
            bare, target, rounds = bare + times, target + calls, rounds + whole
    bare_s, target_s, round_s = median(bare), median(target), median(rounds)
    return StepFloor(
        bundle=name,
        context=context,
        num_steps=len(bare),
        bare_s=bare_s,
        target_step_s=target_s,
        round_s=round_s,
        target_step_ratio=target_s / bare_s,
        round_ratio=round_s / bare_s,
    )


def _bare_call(bundle: Bundle, context: int, options: EngineOptions) -> Call:
    target = bundle.manifest.target
    cache = target.cache
    executor = Executor.load(bundle.model_path("target"), target_graph(cache), options)
    past = cache_buffers(cache.past(), cache.shape(1))
    names = zip(cache.past(), cache.present(), strict=True)
    present = {after.name: past[before.name] for before, after in names}
    inputs: dict[str, NDArray[Any]] = {
        "input_ids": np.ones((1, 1), np.int64),
        "past_lengths": np.array([context], np.int32),
        "num_logits": np.array(1, np.int64),
        **chain_inputs(1),
        **past,
    }
    logits = np.zeros((1, 1, target.vocab_size), np.float32)
    return executor.bind(inputs, {"logits": logits, **present})


def _plain_block(
    decoder: Decoder, context: int, steps: int, vocab: int
) -> tuple[list[float], list[float]]:
    """Seconds of the target's call and of the whole round, for `steps` plain steps."""
    calls: list[float] = []
    decoder.on_round = lambda outcome: calls.append(outcome.verify_s)
    prompt = [1 + i % (vocab - 1) for i in range(context)]
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    try:
        result = decoder.generate(prompt, params, num_draft_tokens=0)
    finally:
        decoder.on_round = None
    return calls[-len(result.stats.itl) :], list(result.stats.itl)
