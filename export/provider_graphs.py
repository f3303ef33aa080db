"""From an open checkpoint to graphs for ONNX Runtime's CUDA provider, and their gates on the CPU.

As with engines the decoder is lowered twice from one trace: exactly, in f32, which is held against
the eager model with the same rounded weights; and in fp16, which is what the bundle gets. Every
graph is asked whether the provider has kernels for all of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from engines.external_data import WeightStore, save
from engines.onnxruntime_cuda.kernels import check_kernels
from engines.onnxruntime_cuda.lowering import lower, lower_exactly, lower_sampling
from runtime.contract import CacheSpec, GraphSpec, target_graph
from runtime.manifest import Gate
from runtime.provider_contract import provider_spec

from . import gates
from .checkpoint import Checkpoint
from .draft import Draft
from .engine_gates import EngineGateGraph, exact_logits, skipped
from .engine_graphs import EngineGraph
from .graphs import _bound, rounded_weights
from .provider_precision import ProviderPrecision
from .trace import cache_spec

Array = np.ndarray


def write_decoder(
    name: str,
    checkpoint: Checkpoint,
    precision: ProviderPrecision,
    max_context: int,
    store: WeightStore,
    scratch: Path,
    *,
    vocab_size: int,
    head_rows: int | None = None,
) -> EngineGraph:
    """`name`.onnx in the bundle, and its exact twin in `scratch` where a gate will run it.

    Raises BuildError for a model that the provider wouldn't run whole.
    """
    model = _bound(checkpoint, max_context, head_rows=head_rows)
    exact_path, rounded = None, frozenset[str]()
    if checkpoint.eager_bytes() <= gates.available_bytes():
        exact = lower_exactly(model.clone(), precision.quantizer())
        rounded = rounded_weights(exact, checkpoint)
        exact_path = save(exact, f"{name}.exact", WeightStore(directory=scratch))
    lower(model, precision.quantizer())
    check_kernels(f"{name}.onnx", model)
    path = save(model, name, store)
    cache = replace(cache_spec(checkpoint.config, max_context), dtype=precision.cache_dtype)
    return EngineGraph(
        cache=cache, vocab_size=vocab_size, rounded=rounded, path=path, exact=exact_path
    )


def write_sampling(
    name: str, model: ir.Model, sizes: Mapping[str, int], store: WeightStore
) -> Path:
    """A graph without weights. sizes: of all symbolic axes, in some call.

    Raises BuildError where that call would compute with sizes, or lacks a kernel.
    """
    lower_sampling(model)
    check_kernels(f"{name}.onnx", folded(model, sizes))
    return save(model, name, store)


def folded(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """As ONNX Runtime sees the graph when a provider is asked for kernels: sizes are constants."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    for axis, size in sizes.items():
        options.add_free_dimension_override_by_name(axis, size)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "folded.onnx"
        options.optimized_model_filepath = str(path)
        proto = ir.to_proto(model).SerializeToString()
        ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
        return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.load(path)))


class ProviderGateGraph(EngineGateGraph):
    """A decoder on ONNX Runtime's CPU, told of the cache rows that there are."""

    @staticmethod
    def _spec(cache: CacheSpec) -> GraphSpec:
        return provider_spec(target_graph(cache))

    def _sizes(self, count: int) -> dict[str, Array]:
        rows = np.arange(count, dtype=np.int64)
        total = np.array([self.length + count], np.int32)
        return {"query_rows": rows, "logit_rows": rows, "total_length": total}


def draft_gates(
    draft: Draft, graph: EngineGraph, precision: ProviderPrecision, tokens: Sequence[int]
) -> list[Gate]:
    """The decoder's logits against the eager draft's. Raises GateFailed."""
    if graph.exact is None:
        return [skipped("draft parity", draft.checkpoint)]
    tokens = tokens[: graph.cache.max_context]
    exact = ProviderGateGraph(graph.exact, graph.exact_cache, graph.vocab_size)
    narrow = ProviderGateGraph(graph.path, graph.cache, graph.vocab_size)
    return [
        gates.parity(
            "draft parity",
            lambda: exact.in_chunks(tokens),
            lambda: narrow.in_chunks(tokens),
            draft.load_eager,
            tokens,
            precision,
            graph.rounded,
            needs_bytes=draft.checkpoint.eager_bytes(),
        )
    ]


def exact_probs(graph: EngineGraph, tokens: Sequence[int]) -> Array | None:
    """q at temperature 1 behind each of the first tokens: [n, draft_vocab] f32."""
    logits = exact_logits(graph, tokens[: graph.cache.max_context], ProviderGateGraph)
    if logits is None:
        return None
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
