"""The search for layers to skip, on a written target and texts that it writes itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx_ir as ir

from engines.onnxruntime.lowering import make_skippable
from runtime.bench.prompts import load_prompts
from runtime.contract import CacheSpec, tail_graph
from runtime.errors import BuildError
from runtime.executor import EngineOptions, Executor
from runtime.sampling import SamplingParams
from runtime.sampling_inputs import SamplingInputs
from runtime.text import Text

from .layer_search import Layers, LayerSearch, Score, StepCosts, ceiling, score
from .profile import encoded
from .skippable_graph import Array, Page, SkippableGraph
from .special_tokens import SpecialTokens

logger = logging.getLogger(__name__)

ANSWER = 64  # tokens a page
PAGES = 12  # a third of them judge the winner
LEAST_REPEATS, MOST_REPEATS = 15, 100
FEWEST = 3
MOST_SET_S = 1 / 60  # of the search's time, for scoring one set


def choose_layers(
    onnx: Path,
    text_files: Path,  # where the tokenizer is
    *,
    cache: CacheSpec,
    vocab_size: int,
    special: SpecialTokens,
    most: int,
    seconds: float,
) -> Score:
    """The best set found within about `seconds`, as pages say that it wasn't chosen by.

    Raises BuildError where the target writes nothing.
    """
    start = perf_counter()
    graph = _open(onnx, cache, vocab_size, most)
    prompts = _prompts(text_files, special, vocab_size, cache.max_context - ANSWER - 2)
    pages = _written(graph, prompts, special.eos_token_ids, start + seconds / 4)
    length = min(256, cache.max_context // 2)
    costs = _costs(graph, cache.layers, most, length, _tail_seconds(onnx, vocab_size), seconds / 12)
    held_out, chosen_by = pages[::3], [p for i, p in enumerate(pages) if i % 3] or pages

    def on(some: Sequence[Page], skipped: Layers) -> Score:
        hits = [graph.hits(page, sorted(skipped), most) for page in some]
        return score(skipped, hits, costs, most)

    chosen_by = _affordable(lambda some: on(some, frozenset([1])), chosen_by, seconds)
    search = LayerSearch(
        layers=cache.layers,
        evaluate=lambda skipped: on(chosen_by, skipped),
        ceiling=lambda skipped: ceiling(skipped, costs, most),
        deadline=start + seconds,
    )
    best = search.run()
    logger.info("layer-skip: %d sets tried; on the search's own pages %s", len(search.seen), best)
    return on(held_out, best.skipped)


def _open(onnx: Path, cache: CacheSpec, vocab_size: int, most: int) -> SkippableGraph:
    """Beside the target, whose weights it reads; the file is gone once the session is there."""
    path = onnx / "target.search.onnx"
    model = make_skippable(ir.load(onnx / "target.onnx"), None)
    path.write_bytes(ir.to_proto(model).SerializeToString())
    try:
        return SkippableGraph(path, cache, vocab_size, most + 1)
    finally:
        path.unlink()


def _prompts(
    text_files: Path, special: SpecialTokens, vocab_size: int, room: int
) -> list[list[int]]:
    """The shipped ones, spread over their categories, cut to what the context has room for."""
    template = text_files / "chat_template.jinja"
    text = Text(
        text_files / "tokenizer.json",
        template.read_text(encoding="utf-8") if template.exists() else None,
        special.bos_token_id,
        special.eos_token_ids,
    )
    prompts = load_prompts([], ["shipped"], None)
    spread = prompts[:: max(1, len(prompts) // PAGES)][:PAGES]
    tokens = [[t % vocab_size for t in encoded(text, prompt)[:room]] for prompt in spread]
    return [one for one in tokens if one]


def _written(
    graph: SkippableGraph, prompts: Sequence[list[int]], ends: Sequence[int], deadline: float
) -> list[Page]:
    pages: list[Page] = []
    for prompt in prompts:
        page = graph.write(prompt, ANSWER, ends)
        if len(page.tokens) > page.start + 1:
            pages.append(page)
        if perf_counter() > deadline and len(pages) > 2:
            break
    if not pages:
        raise BuildError(
            "--draft layer-skip: the target ends every text at once, so that there is nothing to "
            "measure acceptance on. Expected a target that writes; force a set with --skip-layers."
        )
    return pages


def _affordable(
    trial: Callable[[Sequence[Page]], Score], pages: list[Page], seconds: float
) -> list[Page]:
    """As many pages as one set's score may take, but not so few that luck decides."""
    trial(pages[:1])  # binds the calls
    start = perf_counter()
    trial(pages[:1])
    page_s = perf_counter() - start
    return pages[: max(FEWEST, int(seconds * MOST_SET_S / page_s))]


def _costs(
    graph: SkippableGraph, layers: int, most: int, length: int, tail_s: float, within_s: float
) -> StepCosts:
    """The least of interleaved runs: what others do on the machine only ever adds.

    More rows never cost less; where a measurement says so, it was disturbed.
    """
    counts, everything = _some_counts(most + 1), tuple(range(layers))
    kinds = [*((rows, ()) for rows in counts), (1, everything)]
    least, repeats, end = dict.fromkeys(kinds, float("inf")), 0, perf_counter() + within_s
    while repeats < LEAST_REPEATS or (repeats < MOST_REPEATS and perf_counter() < end):
        repeats += 1
        for rows, skipped in kinds:
            least[rows, skipped] = min(least[rows, skipped], graph.seconds(rows, skipped, length))
    rising = accumulate((least[rows, ()] for rows in counts), max)
    verify_s = dict(zip(counts, rising, strict=True))
    layer_s = max(0.0, verify_s[1] - least[1, everything]) / layers
    return StepCosts(verify_s=verify_s, layer_s=layer_s, tail_s=tail_s)


def _some_counts(most: int) -> list[int]:
    """1, 2, 3, 5, 9, … and the last: between them costs are linear enough."""
    return sorted({1, most, *(1 + 2**i for i in range(7) if 1 + 2**i < most)})


def _tail_seconds(onnx: Path, vocab_size: int) -> float:
    executor = Executor.load(onnx / "tail.onnx", tail_graph(), EngineOptions(spin=False))
    sampling = SamplingInputs(vocab_size, rows=1)
    sampling.begin(SamplingParams(), ())
    inputs: dict[str, Array] = {
        "logits": np.zeros((1, 1, vocab_size), np.float32),
        "draft_uniforms": np.zeros(1, np.float32),
        "drafted_tokens": np.zeros((1, 0), np.int64),
        "allowed_tokens": sampling.allowed,
        **sampling.shared,
    }
    outputs: dict[str, Array] = {
        "draft_token": np.zeros((1, 1), np.int64),
        "draft_step_probs": np.zeros((1, 1, vocab_size), np.float32),
    }
    call = executor.bind(inputs, outputs)
    return min(call.run() for _ in range(LEAST_REPEATS))
