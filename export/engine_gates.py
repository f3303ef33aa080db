"""The gates of engines' graphs, on ONNX Runtime's CPU: exactly, in f32, and strongly typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtime.contract import CacheSpec, GraphSpec, draft_graph, target_graph
from runtime.engine_contract import engine_spec
from runtime.executor import EngineOptions, Executor, cache_buffers
from runtime.manifest import Gate
from runtime.sampling import SamplingParams
from runtime.sampling_inputs import SamplingInputs
from runtime.tree_buffers import chain_inputs

from . import gates
from .checkpoint import Checkpoint
from .draft import Draft
from .draft_vocabulary import DraftVocabulary, QOver
from .engine_graphs import EngineGraph
from .engine_precision import EnginePrecision
from .exact_graph import exact_arithmetic
from .gate_graph import GateGraph

Array = np.ndarray
AS_WRITTEN = EngineOptions(spin=False, as_written=True)


class EngineGateGraph(GateGraph):
    """The lowered target on ONNX Runtime's CPU, reading no more cache rows than there are."""

    @staticmethod
    def _spec(cache: CacheSpec) -> GraphSpec:
        return engine_spec(target_graph(cache))

    @staticmethod
    def _options() -> EngineOptions:
        return AS_WRITTEN

    def rows(self, tokens: Sequence[int]) -> Array:
        count = len(tokens)
        logits = np.zeros((1, count, self._vocab), np.float32)
        inputs: dict[str, Array] = {
            "input_ids": np.array([tokens], np.int64),
            "past_lengths": np.array([self.length], np.int32),
            **chain_inputs(count),
            **self._sizes(count),
            **self._past,
        }
        outputs = {"logits": logits, **self._present}
        if self.features.shape[1]:
            self.features = np.zeros((count, self.features.shape[1]), np.float32)
            outputs["features"] = self.features[None]
        self._executor.bind(inputs, outputs).run()
        self.length += count
        return logits[0]

    def _sizes(self, count: int) -> dict[str, Array]:
        """What says how large a call over `count` rows is."""
        return {
            "logit_slots": np.zeros(count, np.int32),
            "context_slots": np.zeros(self.length + count, np.int32),
        }


class Typed(gates.Rounding, Protocol):
    """A precision whose activations have a type of their own.

    missing_on_cpu: what ONNX Runtime's CPU has no kernels for, such as bf16.
    """

    @property
    def missing_on_cpu(self) -> str | None: ...


def target_gates(
    checkpoint: Checkpoint,
    graph: EngineGraph,
    precision: Typed,
    tokens: Sequence[int],
    k: int,
    gate_graph: type[EngineGateGraph] = EngineGateGraph,
) -> list[Gate]:
    """The lowered graph against the eager model, k + 1 rows against row by row, a rollback, and
    the strongly typed graph against the exact one. Raises GateFailed."""
    if graph.exact is None:
        return [skipped("target parity", checkpoint)]
    with exact_arithmetic(graph.exact) as path:
        exact = gate_graph(path, graph.exact_cache, graph.vocab_size)
    narrow = exact
    if precision.missing_on_cpu is None:
        narrow = gate_graph(graph.path, graph.cache, graph.vocab_size)
    found = [
        gates.parity(
            "target parity",
            lambda: exact.in_chunks(tokens),
            lambda: narrow.in_chunks(tokens),
            checkpoint.load_eager,
            tokens,
            precision,
            graph.rounded,
            needs_bytes=checkpoint.eager_bytes(),
        ),
        gates.rows_at_once(exact, tokens, k),
        gates.rollback(narrow, tokens, k),
    ]
    if narrow is exact:
        reason = f"ONNX Runtime's CPU has no kernels for {precision.missing_on_cpu}"
        return [*found, Gate(name="engine", status="skipped", reason=reason)]
    return [*found, gates.engine_noise(narrow, exact, tokens, k, precision)]


def exact_logits(
    graph: EngineGraph,
    tokens: Sequence[int],
    gate_graph: type[EngineGateGraph] = EngineGateGraph,
) -> Array | None:
    """In f32 arithmetic, inputs rounded where the engine rounds them: [len(tokens), vocab]; None
    where no gate could run."""
    if graph.exact is None:
        return None
    return gate_graph(graph.exact, graph.exact_cache, graph.vocab_size).in_chunks(tokens)


def exact_states(graph: EngineGraph, tokens: Sequence[int]) -> Array:
    """The hidden states that a head reads, in f32 arithmetic: [len(tokens), feature_width]."""
    assert graph.exact is not None  # or no gate of a head runs
    exact = EngineGateGraph(graph.exact, graph.exact_cache, graph.vocab_size)
    exact.rows(tokens)
    return exact.features


def states_gates(
    checkpoint: Checkpoint,
    graph: EngineGraph,
    precision: EnginePrecision,
    tokens: Sequence[int],
    taps: Sequence[int],
) -> list[Gate]:
    """Those states against the eager model's. Raises GateFailed."""
    if graph.exact is None:
        return [skipped("features", checkpoint)]
    with exact_arithmetic(graph.exact) as path:
        exact = EngineGateGraph(path, graph.exact_cache, graph.vocab_size)
    return [
        gates.features_parity(
            exact, checkpoint.load_eager, tokens, taps, precision, graph.rounded,
            needs_bytes=checkpoint.eager_bytes(),
        )
    ]  # fmt: skip


def exact_probs(graph: EngineGraph, size: int, tokens: Sequence[int]) -> Array | None:
    """q at temperature 1 behind each of the first tokens: [n, size]."""
    if graph.exact is None:
        return None
    return _draft_probs(graph.exact, graph.exact_cache, size, tokens[: graph.cache.max_context])


def draft_gates(
    draft: Draft,
    graph: EngineGraph,
    precision: EnginePrecision,
    vocabulary: DraftVocabulary,
    tokens: Sequence[int],
) -> list[Gate]:
    """q against the eager draft. Raises GateFailed."""
    if graph.exact is None:
        return [skipped("draft parity", draft.checkpoint)]
    tokens = tokens[: graph.cache.max_context]
    size, path = vocabulary.q_size(QOver.DRAFT), graph.exact

    def probs() -> Array:
        return _draft_probs(path, graph.exact_cache, size, tokens)

    gate = gates.parity(
        "draft parity",
        probs,
        probs,
        draft.load_eager,
        tokens,
        precision,
        graph.rounded,
        needs_bytes=draft.checkpoint.eager_bytes(),
    )
    return [gate]


def _draft_probs(path: Path, cache: CacheSpec, size: int, tokens: Sequence[int]) -> Array:
    """q behind each prefix, at temperature 1: [len(tokens), size] f32."""
    executor = Executor.load(path, engine_spec(draft_graph(cache)), AS_WRITTEN)
    sampling = SamplingInputs(executor.axes["vocab"], rows=1)
    sampling.begin(SamplingParams(temperature=1.0), ())
    past = cache_buffers(cache.past(), cache.shape(1))
    pairs = zip(cache.past(), cache.present(), strict=True)
    present = {p.name: past[q.name] for q, p in pairs}
    found = np.zeros((len(tokens), 1, 1, size), np.float32)
    for i, token in enumerate(tokens):
        inputs: dict[str, Any] = {
            "input_ids": np.array([[token]], np.int64),
            "past_lengths": np.array([i], np.int32),
            "context_slots": np.zeros(i + 1, np.int32),
            "draft_uniforms": np.zeros(1, np.float32),
            "drafted_tokens": np.zeros((1, 0), np.int64),
            "allowed_tokens": sampling.allowed,
            **sampling.shared,
            **past,
        }
        outputs: dict[str, Any] = {"draft_token": np.zeros((1, 1), np.int64)}
        outputs |= {"draft_step_probs": found[i], **present}
        executor.bind(inputs, outputs).run()
    return found[:, 0, 0, : executor.axes["vocab"]]


def skipped(name: str, checkpoint: Checkpoint) -> Gate:
    needed = f"{checkpoint.eager_bytes() / 1e9:.1f} GB"
    reason = f"the eager model needs {needed} of memory, more than is free"
    return Gate(name=name, status="skipped", reason=reason)
