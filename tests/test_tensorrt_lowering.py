"""Graphs lowered for TensorRT against the eager model, on ONNX Runtime's CPU.

The passes before the types are exact: f32 parity as tight as the portable graph's. The strongly
typed graph is then held to fp16's own rounding. Context buckets are as small as each call allows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from family_configs import FAMILIES, MAX_CONTEXT, VOCAB, Family
from helpers_family import (
    CHUNKS,
    bind,
    eager_logits,
    operators,
    portable_graph,
    random_model,
    text,
    written,
)
from helpers_lowering import graph_of, random, run
from helpers_tensorrt import OracleGraph, run_unfused, types_of

from calibration.input_scales import LayerInput
from engines.qdq import EightBits, Qdq, QdqLinearPass
from engines.tensorrt.attention import SoftCapPass
from engines.tensorrt.lowering import exact_passes, lower
from engines.tensorrt.strong_types import NARROW, StrongTypesPass, meant_casts, widening_casts
from engines.tensorrt.weight_only import WeightFormat, WeightOnlyPass
from export.gates import relative_error
from runtime.errors import BuildError

F16 = ir.DataType.FLOAT16
PARITY = 2e-5  # f32 sums in another order; a window off by one row gives 0.1 and more
ROUNDING = 2e-2  # of fp16 over two layers: 11 bits, a few hundred roundings behind one another
INT4 = WeightFormat(kind="int4", block=16, scales=np.dtype(np.float16))
STEPS = [*exact_passes(INT4), StrongTypesPass(F16)]
TEXT = text(sum(CHUNKS), VOCAB)
QUICK = ("llama", "qwen3", "gemma2", "gpt2")  # biases, norms inside, soft caps and windows, Gemm


def _params() -> list[object]:
    return [
        pytest.param(f, id=f.name, marks=[] if f.name in QUICK else [pytest.mark.slow])
        for f in FAMILIES
    ]


@pytest.mark.parametrize("family", _params())
def test_a_lowered_graph_is_the_model(family: Family, tmp_path: Path) -> None:
    config = family.config()
    model = random_model(config)
    expected = eager_logits(model, TEXT)
    graph = portable_graph(config, MAX_CONTEXT)
    bind(graph, model)
    for step in exact_passes():
        step(graph)
    exact = OracleGraph(written(graph.clone(), "f32", tmp_path), MAX_CONTEXT)
    assert relative_error(exact.in_chunks(TEXT), expected) < PARITY
    _check_operators(graph)

    assert StrongTypesPass(F16)(graph).modified
    narrow = OracleGraph(written(graph, "fp16", tmp_path), MAX_CONTEXT)
    assert relative_error(narrow.in_chunks(TEXT, bucket=16), expected) < ROUNDING
    _check_types(graph)


def _check_operators(graph: ir.Model) -> None:
    found = operators(graph)
    assert not found["ReduceMean"], "a norm is spelled out"
    assert found["RMSNormalization"] + found["LayerNormalization"] >= 3
    inputs = {v.name for v in graph.graph.inputs}
    assert {"logit_slots", "context_slots"} <= inputs
    assert "num_logits" not in inputs


def _check_types(graph: ir.Model) -> None:
    assert types_of(graph, "MatMul", "TensorScatter", "Attention") == {F16}
    assert types_of(graph, "Cos", "Sin") <= {ir.DataType.FLOAT}
    norms = operators(graph)["RMSNormalization"] + operators(graph)["LayerNormalization"]
    assert meant_casts(graph) == 1 + norms, "the logits alone leave as f32"
    assert not widening_casts(graph)
    for value in graph.graph.inputs:
        assert value.dtype != ir.DataType.FLOAT


@pytest.mark.parametrize("step", STEPS, ids=lambda s: type(s).__name__)
def test_no_change_where_there_is_nothing_to_do(step: ir.passes.PassBase) -> None:
    model = graph_of("g (int64[1,s] x) => (int64[1,s] y) { t = Abs(x)  y = Neg(t) }", {})
    assert not step(model).modified
    assert operators(model) == {"Abs": 1, "Neg": 1}


@pytest.mark.parametrize("step", STEPS, ids=lambda s: type(s).__name__)
def test_a_second_time_changes_nothing(step: ir.passes.PassBase, small_graph: ir.Model) -> None:
    model = small_graph.clone()
    for one in STEPS[: STEPS.index(step) + 1]:
        one(model)
    assert not step(model).modified


@pytest.fixture(scope="module")
def small_graph() -> ir.Model:
    config = FAMILIES[0].config(num_hidden_layers=1)
    graph = portable_graph(config, MAX_CONTEXT)
    bind(graph, random_model(config))
    return graph


def test_a_soft_cap_is_spelled_out() -> None:
    model = graph_of(
        """g (float[1,4,3,8] q, float[1,2,5,8] k, float[1,2,5,8] v, bool[1,1,3,5] m)
        => (float[1,4,3,8] y) { y = Attention<scale=0.4, softcap=2.0>(q, k, v, m) }""",
        {},
    )
    seen = np.tril(np.ones((3, 5), np.bool_), 2)[None, None]
    feed = {"q": random(1, 4, 3, 8), "k": random(1, 2, 5, 8), "v": random(1, 2, 5, 8, seed=2)}
    before = run(model, {**feed, "m": seen})
    assert SoftCapPass()(model).modified
    np.testing.assert_allclose(run(model, {**feed, "m": seen})[0], before[0], atol=1e-6)
    assert not operators(model)["Attention"]


def test_a_weight_beyond_fp16_names_bf16() -> None:
    weight = np.full((8, 8), 7e4, np.float32)
    text = "g (float[1,s,8] x, float[8,8] w) => (float[1,s,8] y) { y = MatMul(x, w) }"
    model = graph_of(text, {"w": weight})
    lower(model, F16)
    name = next(n for n in model.graph.initializers if n.startswith("w."))
    with pytest.raises(BuildError, match=r"^w: received values up to 7e\+04.*--precision bf16"):
        model.graph.initializers[name].const_value.numpy()  # type: ignore[union-attr]
    model = graph_of(text, {"w": weight})
    lower(model, NARROW["bf16"])
    made = model.graph.initializers["w.bfloat16"].const_value
    assert made is not None
    assert np.isfinite(made.numpy().astype(np.float32)).all()


def test_an_error_names_the_pass() -> None:
    model = graph_of(
        """g (float[1,2,3,8] q, float[1,2,5,8] k, float[1,2,5,8] v) => (float[1,2,3,8] y)
        { y = Attention<softcap=2.0>(q, k, v) }""",
        {},
    )
    with pytest.raises(BuildError, match=r"lowering pass \w+: .*Expected a portable graph"):
        lower(model, F16)


@pytest.mark.parametrize(
    ("kind", "block", "limit"),
    # The largest magnitude has 127, 7, 448 and 6 steps; fp8 has 4 bits of mantissa, fp4 has 2.
    [("int8", None, 0.5 / 127), ("int4", 16, 0.5 / 7), ("fp8", None, 1 / 16), ("fp4", 16, 1 / 6)],
)
def test_weights_of_few_bits(kind: str, block: int | None, limit: float) -> None:
    """The graph multiplies by what `rounded` says, which is near the weight."""
    fmt = WeightFormat(kind=kind, block=block, scales=np.dtype(np.float16))
    weight = random(24, 32)
    weight[3] = 0
    model = graph_of(
        """g (float[1,s,32] x, float[24,32] w) => (float[1,s,24] y)
        { t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t) }""",
        {"w": weight},
    )
    assert WeightOnlyPass(fmt)(model).modified
    assert model.graph.initializers["w.codes"].dtype == fmt.dtype
    rounded = fmt.rounded(weight)
    x = random(1, 5, 32, seed=1)
    if kind != "fp4":  # of which ONNX Runtime's CPU has no DequantizeLinear
        np.testing.assert_allclose(run_unfused(model, {"x": x})[0], x @ rounded.T, atol=1e-5)
    largest = np.abs(weight.reshape(24, -1, block or 32)).max(-1).repeat(block or 32, axis=1)
    assert (np.abs(rounded - weight) <= largest * limit * 1.01 + 1e-6).all()
    assert not WeightOnlyPass(fmt)(model).modified


def test_rows_that_are_no_whole_blocks_stay() -> None:
    model = graph_of(
        """g (float[1,s,24] x, float[8,24] w) => (float[1,s,8] y)
        { t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t) }""",
        {"w": random(8, 24)},
    )
    assert not WeightOnlyPass(INT4)(model).modified


@pytest.mark.parametrize("kind", list(EightBits), ids=lambda kind: kind.value)
def test_inputs_and_weights_of_8_bits_in_the_graphs_own_type(
    kind: EightBits, tmp_path: Path
) -> None:
    """The typed graph is the exact one but for fp16's rounding; no float but fp16 meets a pair.

    A value within fp16's noise of a tie falls to either side, which layers carry on.
    """
    config = FAMILIES[0].config()
    model, found = random_model(config), []
    one = LayerInput(scale=6 / kind.top, smoothing=None)
    for dtype in (ir.DataType.FLOAT, F16):
        graph = portable_graph(config, MAX_CONTEXT)
        bind(graph, model)
        qdq = Qdq(kind=kind, scale_of=_all_but_the_head(one), scales=np.dtype(np.float16))
        head = WeightFormat(kind=kind.value, block=None, scales=np.dtype(np.float16))
        for step in exact_passes(head, QdqLinearPass(qdq)):
            step(graph)
        if dtype == F16:
            assert StrongTypesPass(F16)(graph).modified
            assert types_of(graph, "MatMul", "DequantizeLinear") == {F16}
            assert types_of(graph, "QuantizeLinear") == {kind.onnx_type}
            assert not widening_casts(graph)
        path = written(graph, dtype.name, tmp_path)
        found.append(OracleGraph(path, MAX_CONTEXT).in_chunks(TEXT))
    plain = eager_logits(model, TEXT)
    rounding = relative_error(found[0], plain)
    assert 0.003 < rounding < 0.5, "inputs were rounded, by one coarse scale for all layers"
    assert relative_error(found[1], found[0]) < max(ROUNDING, 0.5 * rounding)


def _all_but_the_head(one: LayerInput):  # type: ignore[no-untyped-def]
    return lambda name: None if "lm_head" in name else one


@pytest.fixture(scope="module")
def windowed_tree_graph() -> ir.Model:
    """Of a model with one windowed layer and one without, and trees to verify."""
    config = next(f for f in FAMILIES if f.name == "qwen2").config()
    graph = portable_graph(config, MAX_CONTEXT, trees=True)
    bind(graph, random_model(config))
    return graph


def test_a_tree_reads_what_the_portable_graph_reads(
    windowed_tree_graph: ir.Model, tmp_path: Path
) -> None:
    """12 rows of a chain, then a tree of 6 whose columns reach 2 rows back."""
    portable = windowed_tree_graph.clone()
    lowered = windowed_tree_graph.clone()
    for step in exact_passes():
        step(lowered)
    parents = [-1, 0, 1, 1, 2, 1, 0]  # of columns; two before the query stand in a chain
    visible = np.eye(7, dtype=np.bool_)
    for column, parent in enumerate(parents):
        if parent >= 0:
            visible[column] |= visible[parent]
    depths = visible.sum(1)[None] - 1
    tree = {"depths": depths.astype(np.int64), "visible": visible[None, 1:]}
    found = []
    for name, model in (("portable", portable), ("lowered", lowered)):
        graph = OracleGraph(written(model, name, tmp_path), MAX_CONTEXT)
        graph.rows(TEXT[:12])
        found.append(graph.rows(TEXT[12:18], 18, **tree))
        graph.length = 12
        chain = graph.rows(TEXT[12:18], 18)
        assert relative_error(found[-1], chain) > 0.05, "the tree was read as a chain"
    assert relative_error(found[1], found[0]) < PARITY
