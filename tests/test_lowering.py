"""Each pass for ONNX Runtime on a small graph: same numbers, fewer nodes, errors with its name."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from helpers_lowering import Array, check_same, graph_of, operators, random, run

from engines.onnxruntime import lowering
from engines.onnxruntime.activations import ActivationsPass
from engines.onnxruntime.conv1d import GemmToLinearPass
from engines.onnxruntime.full_precision import FoldTransposePass
from engines.onnxruntime.lowering import lower, passes
from engines.onnxruntime.normalization import NormalizationPass
from engines.onnxruntime.projections import PackedProjectionsPass
from engines.onnxruntime.quantized import QuantizedLinearPass
from engines.weight_expressions import FoldWeightExpressionsPass
from export.portable import make_portable
from export.precision import PRECISIONS
from runtime.errors import BuildError

X = random(1, 5, 32, seed=1)
INT8 = PRECISIONS["int8"]


def _quantized_pass() -> QuantizedLinearPass:
    quantizer = INT8.quantizer()
    assert quantizer is not None
    quantizer = type(quantizer)(
        format_of=quantizer.format_of, quantize=quantizer.quantize, accuracy_level=1
    )
    return QuantizedLinearPass(quantizer)


ALL_PASSES = [*passes(None)[:-1], FoldTransposePass(), _quantized_pass()]


@pytest.mark.parametrize("step", ALL_PASSES, ids=lambda s: type(s).__name__)
def test_no_change_where_there_is_nothing_to_do(step: ir.passes.PassBase) -> None:
    model = graph_of("g (float[1,s,32] x) => (float[1,s,32] y) { t = Tanh(x)  y = Exp(t) }", {})
    assert not step(model).modified
    assert operators(model) == {"Tanh": 1, "Exp": 1}


def test_an_error_names_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenPass(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            raise KeyError("perm")

    monkeypatch.setattr(lowering, "passes", lambda *_: [BrokenPass()])
    model = graph_of("g (float[1] x) => (float[1] y) { y = Exp(x) }", {})
    with pytest.raises(BuildError, match=r"lowering pass BrokenPass: .*perm.*Expected"):
        lower(model, None)


# ---------------------------------------------------------------- weights


def test_weight_expressions_become_weights() -> None:
    weight = random(32)
    model = graph_of(
        """g (float[1,s,32] x, float[32] w) => (float[1,s,32] y)
        { one = Constant<value = float {1.0}>()  scale = Add(one, w)
          half = Constant<value = float {2.0}>()  less = Div(scale, half)  y = Mul(x, less) }""",
        {"w": weight},
    )
    check_same(model, FoldWeightExpressionsPass(), {"x": X})
    assert operators(model) == {"Mul": 1}


def test_a_matrix_keeps_its_name() -> None:
    model = graph_of(
        """g (float[1,s,32] x, float[32,32] w) => (float[1,s,32] y)
        { two = Constant<value = float {2.0}>()  w2 = Mul(w, two)  y = MatMul(x, w2) }""",
        {"w": random(32, 32)},
    )
    assert not FoldWeightExpressionsPass()(model).modified


def test_transposes_of_weights_are_folded() -> None:
    model = graph_of(
        """g (float[1,s,32] x, float[16,32] w) => (float[1,s,16] y)
        { t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t) }""",
        {"w": random(16, 32)},
    )
    check_same(model, FoldTransposePass(), {"x": X})
    assert operators(model) == {"MatMul": 1}


def test_weights_without_values_are_never_merged() -> None:
    """Equal shapes, no values, the same reader: an optimizer must not take two for one."""
    model = graph_of(
        """g (int64[batch,query_len] input_ids, int64[n] logit_rows,
             float[1,s,32] x, float[32] a, float[32] b) => (float[1,s,32] y)
        { p = Mul(x, a)  q = Mul(x, b)  y = Sub(p, q) }""",
        {"a": random(32), "b": random(32, seed=9)},
    )
    expected = run_y(model)
    values = {name: v.const_value for name, v in model.graph.initializers.items()}
    for value in model.graph.initializers.values():
        value.const_value = None
    make_portable(model)
    assert set(model.graph.initializers) == {"a", "b"}
    for name, value in model.graph.initializers.items():
        value.const_value = values[name]
    assert np.abs(run_y(model) - expected).max() == 0
    lower(model, None)
    assert np.abs(run_y(model) - expected).max() == 0


def run_y(model: ir.Model) -> Array:
    feed: dict[str, Array] = {
        "input_ids": np.zeros((1, 5), np.int64),
        "logit_rows": np.zeros(1, np.int64),
        "num_logits": np.array(1, np.int64),
        "x": X,
    }
    names = {v.name for v in model.graph.inputs}
    return run(model, {k: v for k, v in feed.items() if k in names})[0]


# ---------------------------------------------------------------- linear layers

GEMM = """g (float[1,s,32] x, float[{w}] w, float[48] b) => (float[1,s,48] y)
{{ rows = Constant<value_ints=[-1,32]>()  flat = Reshape(x, rows)
  p = Gemm<transB={trans}>(flat, w, b)  sizes = Shape<end=2>(x)
  last = Constant<value_ints=[48]>()  full = Concat<axis=0>(sizes, last)  y = Reshape(p, full) }}"""


@pytest.mark.parametrize(("shape", "trans"), [((32, 48), 0), ((48, 32), 1)])
def test_gemm_becomes_a_linear_layer(shape: tuple[int, int], trans: int) -> None:
    text = GEMM.format(w=",".join(map(str, shape)), trans=trans)
    model = graph_of(text, {"w": random(*shape), "b": random(48)})
    model.graph.outputs[0].shape = ir.Shape([1, "s", 48])
    check_same(model, GemmToLinearPass(), {"x": X})
    assert operators(model)["Gemm"] == 0
    assert _quantized_pass()(model).modified
    assert operators(model)["MatMulNBits"] == 1


PROJECTIONS = """g (float[1,s,32] x, float[64,32] q, float[16,32] k, float[16] kb)
=> (float[1,s,64] a, float[1,s,16] b)
{ qt = Transpose<perm=[1,0]>(q)  a = MatMul(x, qt)
  kt = Transpose<perm=[1,0]>(k)  kp = MatMul(x, kt)  b = Add(kp, kb) }"""


def _projections() -> ir.Model:
    weights = {"q": random(64, 32), "k": random(16, 32), "kb": random(16)}
    return graph_of(PROJECTIONS, weights)


def test_projections_of_one_input_are_packed() -> None:
    model = _projections()
    check_same(model, PackedProjectionsPass(), {"x": X})
    assert operators(model) == {"Transpose": 1, "MatMul": 1, "Add": 1, "Split": 1}
    assert [v.name for v in model.graph.outputs] == ["a", "b"]


@pytest.mark.parametrize("packed", [False, True])
def test_quantized_layers_multiply_by_the_rounded_weights(packed: bool) -> None:
    model = _projections()
    if packed:
        PackedProjectionsPass()(model)
    _quantized_pass()(model)
    assert operators(model)["MatMulNBits"] == (1 if packed else 2)
    assert operators(model)["MatMul"] == 0
    found_q, found_k = run(model, {"x": X})
    np.testing.assert_allclose(found_q, X @ INT8.rounded(random(64, 32)).T, atol=1e-4)
    np.testing.assert_allclose(found_k, X @ INT8.rounded(random(16, 32)).T + random(16), atol=1e-4)


def test_a_layer_behind_a_layer_reads_the_quantized_one() -> None:
    """With no operator between them, as the fusion of an EAGLE-1 head and its projections."""
    first, second = random(64, 32), random(16, 64)
    model = graph_of(
        """g (float[1,s,32] x, float[64,32] a, float[16,64] b) => (float[1,s,16] y)
        { at = Transpose<perm=[1,0]>(a)  h = MatMul(x, at)
          bt = Transpose<perm=[1,0]>(b)  y = MatMul(h, bt) }""",
        {"a": first, "b": second},
    )
    _quantized_pass()(model)
    assert operators(model) == {"MatMulNBits": 2}
    (found,) = run(model, {"x": X})
    expected = X @ INT8.rounded(first).T @ INT8.rounded(second).T
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_an_embedding_is_quantized() -> None:
    table = random(40, 32)
    model = graph_of(
        """g (int64[1,s] input_ids, float[40,32] e) => (float[1,s,32] y)
        { y = Gather(e, input_ids) }""",
        {"e": table},
    )
    assert _quantized_pass()(model).modified
    assert operators(model) == {"GatherBlockQuantized": 1}
    (found,) = run(model, {"input_ids": np.array([[3, 39, 0]])})
    np.testing.assert_allclose(found[0], INT8.rounded(table)[[3, 39, 0]], atol=1e-6)


# ---------------------------------------------------------------- norms and activations

RMS = """g (float[1,s,32] x, float[1,s,32] r, float[{w}] w) => (float[1,s,32] y, float[1,s,32] h)
{{ h = Add(r, x)  two = Constant<value = float {{2.0}}>()  sq = Pow(h, two)
  last = Constant<value_ints=[-1]>()  m = ReduceMean<keepdims=1, noop_with_empty_axes=0>(sq, last)
  eps = Constant<value = float {{0.00001}}>()  v = Add(m, eps)  s0 = Sqrt(v)  i = Reciprocal(s0)
  n = Mul(h, i)  y = Mul({order}) }}"""


@pytest.mark.parametrize("order", ["w, n", "n, w"])
def test_an_rms_norm_is_fused_with_its_residual(order: str) -> None:
    model = graph_of(RMS.format(w=32, order=order), {"w": random(32)})
    check_same(model, NormalizationPass(), {"x": X, "r": random(1, 5, 32, seed=2)})
    assert operators(model) == {"SkipSimplifiedLayerNormalization": 1}


def test_a_scale_that_is_no_vector_stays() -> None:
    model = graph_of(RMS.format(w="1,1,32", order="w, n"), {"w": random(1, 1, 32)})
    assert not NormalizationPass()(model).modified


@pytest.mark.parametrize("order", ["w, n", "n, w"])
def test_a_layer_norm_without_bias_is_fused(order: str) -> None:
    model = graph_of(
        f"""g (float[1,s,32] x, float[32] w) => (float[1,s,32] y)
        {{ last = Constant<value_ints=[-1]>()  m = ReduceMean<keepdims=1>(x, last)  d = Sub(x, m)
          two = Constant<value = float {{2.0}}>()  sq = Pow(d, two)
          v = ReduceMean<keepdims=1>(sq, last)  eps = Constant<value = float {{0.00001}}>()
          ve = Add(v, eps)  s0 = Sqrt(ve)  i = Reciprocal(s0)  n = Mul(d, i)
          y = Mul({order}) }}""",
        {"w": random(32)},
    )
    check_same(model, NormalizationPass(), {"x": X})
    assert operators(model) == {"LayerNormalization": 1}


def test_a_norm_moves_before_the_transpose() -> None:
    model = graph_of(
        """g (float[1,s,2,16] x, float[16] w, float[16] b) => (float[1,2,s,16] y)
        { t = Transpose<perm=[0,2,1,3]>(x)  y = LayerNormalization<axis=-1>(t, w, b) }""",
        {"w": random(16), "b": random(16, seed=3)},
    )
    check_same(model, NormalizationPass(), {"x": random(1, 5, 2, 16)})
    assert [node.op_type for node in model.graph] == ["LayerNormalization", "Transpose"]


@pytest.mark.parametrize("body", ["g = Sigmoid(x)  y = Mul(x, g)", "g = Sigmoid(x)  y = Mul(g, x)"])
def test_silu_is_one_operator(body: str) -> None:
    model = graph_of(f"g (float[1,s,32] x) => (float[1,s,32] y) {{ {body} }}", {})
    check_same(model, ActivationsPass(), {"x": X})
    assert operators(model) == {"QuickGelu": 1}


def test_gelu_is_one_operator() -> None:
    model = graph_of(
        """g (float[1,s,32] x) => (float[1,s,32] y)
        { half = Constant<value = float {0.5}>()  h = Mul(x, half)
          three = Constant<value = float {3.0}>()  cube = Pow(x, three)
          c = Constant<value = float {0.044715}>()  p = Mul(cube, c)  q = Add(x, p)
          root = Constant<value = float {0.7978845608}>()  r = Mul(q, root)  t = Tanh(r)
          one = Constant<value = float {1.0}>()  u = Add(t, one)  y = Mul(h, u) }""",
        {},
    )
    check_same(model, ActivationsPass(), {"x": X})
    assert operators(model) == {"Gelu": 1}


def test_a_table_of_positions_stays() -> None:
    model = graph_of(
        """g (int64[1,s] input_ids, float[40,32] e) => (float[1,s,32] y)
        { two = Constant<value_int=2>()  p = Add(input_ids, two)  y = Gather(e, p) }""",
        {"e": random(40, 32)},
    )
    assert not _quantized_pass()(model).modified
