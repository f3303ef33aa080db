"""What the family tests share: a random model, its traced graph, and runs in uneven chunks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engines.external_data import WeightStore, save
from engines.onnxruntime.lowering import lower
from export.gate_graph import GateGraph
from export.portable import bind_weights, make_portable, weight_shapes
from export.precision import Precision
from export.trace import cache_spec, trace_decoder

Array = np.ndarray
CHUNKS = (5, 1, 9, 3, 1, 1, 12)  # prefill, decoding and verification; 32 rows


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """An eager model in which every parameter matters: no bias is 0, no norm weight is 1."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 * 1.5 if parameter.dim() > 1 else 0.2
            parameter.copy_(noise * scale + (parameter.dim() == 1) * parameter)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def eager_logits(model: PreTrainedModel, tokens: list[int]) -> Array:
    return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def text(length: int, vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(7).integers(3, vocab, length)]


def portable_graph(config: PretrainedConfig, max_context: int, *, trees: bool = False) -> ir.Model:
    return make_portable(trace_decoder(config, max_context, trees=trees))


def bind(graph: ir.Model, model: PreTrainedModel) -> list[str]:
    """Give the graph its weights; returns a list that grows by each name that is loaded."""
    state, loaded = model.state_dict(), []
    assert set(weight_shapes(graph)) <= set(state)

    def load(name: str) -> Array:
        loaded.append(name)
        return state[name].numpy()

    bind_weights(graph, load)
    return loaded


def lowered(graph: ir.Model, model: PreTrainedModel, precision: Precision) -> ir.Model:
    """A lowered copy; `graph` stays as it is."""
    copy = graph.clone()
    loaded = bind(copy, model)
    lower(copy, precision.quantizer())
    large = [name for name in loaded if model.get_parameter(name).dim() > 1]
    assert not large, f"weights evaluated while lowering: {large}"
    return copy


def rounded_names(graph: ir.Model, model: PreTrainedModel) -> frozenset[str]:
    """Parameters behind the codes of a lowered graph, with every name that a tied one has."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    codes = [n.removesuffix(".table") for n in graph.graph.initializers]
    joined = [n.removesuffix(".codes") for n in codes if n.endswith(".codes")]
    names = {name for several in joined for name in several.split("+")}
    tied = [parameters[n] for n in names if n in parameters]
    return frozenset(names | {n for n, p in parameters.items() if any(p is q for q in tied)})


def written(graph: ir.Model, name: str, directory: Path) -> Path:
    return save(graph, name, WeightStore(directory=directory))


def in_chunks(path: Path, config: PretrainedConfig, max_context: int, tokens: list[int]) -> Array:
    """Logits [len(tokens), vocab]: uneven chunks, each after a wrong one that was rolled back."""
    vocab = config.vocab_size
    graph = GateGraph(path, cache_spec(config, max_context), vocab)
    found, start = [], 0
    for size in CHUNKS:
        chunk = tokens[start : start + size]
        graph.rows([(t + 11) % vocab for t in [*chunk, *chunk[:2]]])
        graph.length = start
        found.append(graph.rows(chunk))
        start += size
    assert start == len(tokens)
    return np.concatenate(found)


def operators(graph: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in graph.graph)
