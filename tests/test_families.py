"""Every model family: parity with the eager model, portable and lowered, or a refusal by name.

Each family is traced once; the text is longer than any sliding window and than the original
maximum of any scaled RoPE. Chunks are uneven and each follows a wrong one that was rolled back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from family_configs import BASE, FAMILIES, MAX_CONTEXT, REFUSALS, VOCAB, Family, rope
from helpers_family import (
    CHUNKS,
    Array,
    bind,
    eager_logits,
    in_chunks,
    lowered,
    operators,
    portable_graph,
    random_model,
    rounded_names,
    text,
    written,
)
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from engines.onnxruntime.lowering import make_skippable
from export.features import TESTED, refuse_unproven, refuse_unsupported
from export.gate_graph import GateGraph
from export.gates import exact_arithmetic, relative_error, round_weights
from export.layer_skip_draft import without_layers
from export.portable import weight_shapes
from export.precision import PRECISIONS
from export.trace import cache_spec, trace_decoder
from runtime.contract import SKIP_LAYERS
from runtime.errors import UnsupportedModel

# f32 sums in another order give 1e-6 on two layers; a window off by one row gives 0.1 and more.
PARITY = 2e-5
VISIBLE = 0.05
TEXT = text(sum(CHUNKS), VOCAB)


@dataclass(frozen=True, kw_only=True)
class Traced:
    family: Family
    config: PretrainedConfig
    model: PreTrainedModel
    graph: ir.Model  # portable, without weights; shared: tests change copies
    expected: Array  # eager logits on TEXT


def _params() -> list[object]:
    return [
        pytest.param(f, id=f.name, marks=[pytest.mark.slow] if f.slow else []) for f in FAMILIES
    ]


@pytest.fixture(scope="module", params=_params())
def traced(request: pytest.FixtureRequest) -> Traced:
    family: Family = request.param
    config = family.config()
    model = random_model(config)
    return Traced(
        family=family,
        config=config,
        model=model,
        graph=portable_graph(config, MAX_CONTEXT),
        expected=eager_logits(model, TEXT),
    )


def _run(traced: Traced, path: Path) -> Array:
    return in_chunks(path, traced.config, MAX_CONTEXT, TEXT)


def test_portable_graph_is_the_model(traced: Traced, tmp_path: Path) -> None:
    graph = traced.graph.clone()
    bind(graph, traced.model)
    found = _run(traced, written(graph, "portable", tmp_path))
    assert relative_error(found, traced.expected) < PARITY


def test_lowered_graph_is_the_model(traced: Traced, tmp_path: Path) -> None:
    graph = lowered(traced.graph, traced.model, PRECISIONS["fp32"])
    found = _run(traced, written(graph, "lowered", tmp_path))
    assert relative_error(found, traced.expected) < PARITY


def test_int8_graph_is_the_model_with_rounded_weights(traced: Traced, tmp_path: Path) -> None:
    graph = lowered(traced.graph, traced.model, PRECISIONS["int8"])
    names = rounded_names(graph, traced.model)
    rounded = random_model(traced.config)
    round_weights(rounded, PRECISIONS["int8"], names)
    with exact_arithmetic(written(graph, "int8", tmp_path)) as exact:
        found = _run(traced, exact)
    assert relative_error(found, eager_logits(rounded, TEXT)) < PARITY
    assert relative_error(found, traced.expected) > PARITY, "nothing was rounded"


@pytest.mark.parametrize("layer", [0, 1])
def test_either_layer_can_be_left_out(traced: Traced, layer: int, tmp_path: Path) -> None:
    """The model itself with it, the eager model without it."""
    graph = lowered(traced.graph, traced.model, PRECISIONS["fp32"])
    path = written(make_skippable(graph, [layer]), "skippable", tmp_path)
    assert relative_error(_run(traced, path), traced.expected) < PARITY
    cache = cache_spec(traced.config, MAX_CONTEXT)
    skipping = GateGraph(path, cache, VOCAB, {SKIP_LAYERS: np.array(True)})
    expected = eager_logits(without_layers(random_model(traced.config), [layer]), TEXT)
    assert relative_error(skipping.in_chunks(TEXT), expected) < PARITY
    assert relative_error(traced.expected, expected) > VISIBLE


def test_lowering_leaves_nothing_slow(traced: Traced) -> None:
    graph = lowered(traced.graph, traced.model, PRECISIONS["int8"])
    found, family = operators(graph), traced.family
    attention = [n for n in graph.graph if n.op_type == "GroupQueryAttention"]
    assert len(attention) == 2
    assert sum(n.attributes["do_rotary"].as_int() for n in attention) == family.rotary
    assert sum(n.inputs[1] is None for n in attention) == family.packed
    assert found["MatMulNBits"] == family.products
    left = {"MatMul", "Gemm", "Pow", "ReduceMean", "Sqrt", "Attention", "TensorScatter"}
    assert _left(found, left) == family.left


def _left(found: Counter[str], names: set[str]) -> frozenset[str]:
    return frozenset(name for name in names if found[name])


def test_no_weight_is_merged_or_lost(traced: Traced) -> None:
    """Weights without values look alike to an optimizer: each must keep a place of its own."""
    parameters = dict(traced.model.named_parameters())
    tied = dict(traced.model.named_parameters(remove_duplicate=False))
    held = [tied[name] for name in weight_shapes(traced.graph)]
    assert len(held) == len(parameters)
    assert all(any(p is q for q in held) for p in parameters.values())


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.sensitive], ids=lambda f: f.name)
def test_the_text_betrays_a_dropped_feature(family: Family) -> None:
    """The same weights under a configuration without the feature give other logits."""
    model = random_model(family.config())
    expected = eager_logits(model, TEXT)
    for change in family.sensitive:
        other = random_model(family.config(**change))
        other.load_state_dict(model.state_dict())
        assert relative_error(eager_logits(other, TEXT), expected) > VISIBLE, change


def test_every_tested_type_is_in_the_table() -> None:
    assert {f.model_type for f in FAMILIES} == TESTED


@pytest.mark.parametrize("model_type", REFUSALS)
def test_refused_by_name(model_type: str) -> None:
    values, feature = REFUSALS[model_type]
    config = AutoConfig.for_model(model_type.split(":")[0], **values)
    with pytest.raises(UnsupportedModel, match=feature) as caught:
        refuse_unsupported(config, MAX_CONTEXT)
    assert config.model_type in str(caught.value)


def test_a_trace_refuses_before_it_starts() -> None:
    with pytest.raises(UnsupportedModel, match=r"mixtral.*mixture of experts"):
        trace_decoder(AutoConfig.for_model("mixtral", **BASE), MAX_CONTEXT)


@pytest.mark.parametrize(
    "rope_parameters",
    [
        rope("dynamic", factor=2.0),
        rope(
            "longrope",
            short_factor=[1.0] * 8,
            long_factor=[2.0] * 8,
            original_max_position_embeddings=64,
        ),
    ],
    ids=lambda r: r["rope_type"],
)
def test_rope_that_depends_on_the_length(rope_parameters: dict[str, object]) -> None:
    """Carried while the context stays within the original maximum, refused beyond."""
    values = {**BASE, "max_position_embeddings": 64, "rope_parameters": rope_parameters}
    config = AutoConfig.for_model("llama", **values)
    refuse_unsupported(config, 64)
    with pytest.raises(UnsupportedModel, match=r"llama.*--max-context 64 or less"):
        refuse_unsupported(config, 65)


def test_an_untested_type_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    refuse_unsupported(AutoConfig.for_model("arcee", **BASE), MAX_CONTEXT)
    assert "arcee: not among the tested model types" in caplog.text


def test_an_untested_type_needs_the_comparison() -> None:
    config = AutoConfig.for_model("arcee", **BASE)
    refuse_unproven(config, needs_bytes=10, free_bytes=20)
    with pytest.raises(UnsupportedModel, match=r"arcee.*tested"):
        refuse_unproven(config, needs_bytes=20, free_bytes=10)
    refuse_unproven(AutoConfig.for_model("llama", **BASE), needs_bytes=20, free_bytes=10)


def test_the_helpers_text_is_longer_than_every_window() -> None:
    windows = [f.config().sliding_window for f in FAMILIES if "sliding_window" in f.values]
    assert max(w or 0 for w in windows) + max(CHUNKS) < len(TEXT)
    assert np.unique(TEXT).size > 10
