"""Layers of 8-bit weights and inputs: scales from ranges, and the graph as ONNX Runtime runs it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from helpers_build import K
from helpers_calibration import changed_tensor, weight_errors
from helpers_family import (
    CHUNKS,
    bind,
    eager_logits,
    in_chunks,
    operators,
    portable_graph,
    random_model,
    text,
    written,
)
from tiny_checkpoints import llama_config
from transformers import PreTrainedModel

from calibration.collect import Calibration, collect
from calibration.input_scales import (
    InputScales,
    LayerInput,
    RangeRule,
    find_scales,
    input_scale,
    reach,
    smoothing,
)
from calibration.sites import ReferenceGraph
from calibration.statistics import Ranges
from engines.external_data import WeightStore, save
from engines.qdq import EightBits, Qdq, QdqLinearPass
from engines.weights import lazy
from export.build import BuildRequest, build
from export.calibrated import CalibrationRequest
from export.gates import exact_arithmetic
from export.precision import PRECISIONS
from runtime.bundle import Bundle
from runtime.errors import BuildError, EngineError
from runtime.executor import EngineOptions

KINDS = list(EightBits)
FEATURES, ROWS = 48, 20
RNG = np.random.default_rng(0)
# One feature reaches a hundred times further than the others, as in real models.
X = (RNG.standard_normal((64, FEATURES)) * np.where(np.arange(FEATURES) == 5, 100, 1)).astype("f4")
WEIGHT = RNG.standard_normal((ROWS, FEATURES)).astype(np.float32)


def ranges_of(x: np.ndarray) -> Ranges:
    found = Ranges.empty(x.shape[1])
    found.add(x)
    return found


def layer_input(kind: EightBits, smooth: np.ndarray | None) -> LayerInput:
    x = X if smooth is None else X / smooth
    scale = input_scale(ranges_of(x), kind.top, RangeRule.ABSMAX)
    return LayerInput(scale=scale, smoothing=smooth)


def smooth_of(x: np.ndarray) -> np.ndarray:
    return smoothing(np.abs(x).max(0), np.abs(WEIGHT).max(0))


def linear(two: bool = False) -> ir.Model:
    """y = x @ weight.T, and once more by a second weight that reads the same x."""
    x = ir.val("x", ir.DataType.FLOAT, ["rows", FEATURES])
    names = ["first", "second"][: 1 + two]
    outs = [ir.val(f"{n}.y", ir.DataType.FLOAT, ["rows", ROWS]) for n in names]
    graph = ir.Graph([x], outs, nodes=[], opset_imports={"": 24}, name="linear")
    for name, out in zip(names, outs, strict=True):
        weight = lazy(graph, name, lambda: WEIGHT, ir.DataType.FLOAT, WEIGHT.shape)
        transpose = ir.node("Transpose", [weight], {"perm": [1, 0]})
        graph.extend([transpose, ir.node("MatMul", [x, transpose.outputs[0]], outputs=[out])])
    return ir.Model(graph, ir_version=11)


def run(path: Path, x: np.ndarray = X) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# Scales


@pytest.mark.parametrize("rule", list(RangeRule))
def test_rules_agree_where_nothing_lies_far_out(rule: RangeRule) -> None:
    """Values spread evenly: cutting any of them off costs more than it gains."""
    x = np.linspace(-3, 3, 10_000, dtype=np.float32)[:, None]
    assert input_scale(ranges_of(x), 127.0, rule) == pytest.approx(3 / 127, rel=0.02)


@pytest.mark.parametrize("rule", [RangeRule.PERCENTILE, RangeRule.MSE])
def test_a_lone_outlier_is_cut_off_unless_by_absmax(rule: RangeRule) -> None:
    x = np.append(RNG.standard_normal(200_000), 50.0).astype(np.float32)[:, None]
    assert input_scale(ranges_of(x), 127.0, RangeRule.ABSMAX) == pytest.approx(50 / 127)
    assert input_scale(ranges_of(x), 127.0, rule) < 25 / 127


def test_the_least_error_is_the_least() -> None:
    """Against rounding with every other end, in plain arithmetic."""
    x = RNG.standard_t(3, 50_000).astype(np.float32)[:, None]

    def error(scale: float) -> float:
        rounded = np.clip(np.rint(x / scale), -127, 127) * scale
        return float(((x - rounded) ** 2).mean())

    found = error(input_scale(ranges_of(x), 127.0, RangeRule.MSE))
    best = min(error(float(np.abs(x).max()) * i / 200 / 127) for i in range(1, 201))
    assert found < 1.05 * best


def test_reach_tells_a_lone_outlier_from_a_long_tail() -> None:
    values = RNG.standard_normal(200_000).astype(np.float32)[:, None]
    assert reach(ranges_of(values)) < 2
    assert reach(ranges_of(np.append(values, 50.0)[:, None])) == pytest.approx(50 / 3.3, rel=0.1)
    assert reach(Ranges.empty(4)) == 1.0


@pytest.fixture
def calibration(fp32_bundle: Path, tmp_path: Path) -> Calibration:
    card = Bundle.load(fp32_bundle).manifest.target
    return Calibration(
        cache=card.cache,
        vocab=card.vocab_size,
        texts=[[(7 * i + j) % 250 for j in range(20)] for i in range(4)],
        work=tmp_path,
        options=EngineOptions(threads=1, spin=False),
    )


def test_inputs_that_are_not_finite_name_the_layer(
    fp32_bundle: Path, calibration: Calibration, tmp_path: Path
) -> None:
    copied = shutil.copytree(fp32_bundle, tmp_path / "copy")
    name = "model.layers.0.mlp.down_proj.weight.T"
    changed_tensor(name, np.float32, lambda a: a * np.float32("inf"), "target")(copied)
    graph = ReferenceGraph(copied / "onnx" / "target.onnx")
    with pytest.raises(EngineError, match=r"layers\.1\.self_attn\.q_proj.*not finite"):
        find_scales(graph, calibration, top=127.0, rule=RangeRule.MSE, smooth=True)


def test_a_layer_whose_inputs_reach_too_far_is_left_out(
    fp32_bundle: Path, calibration: Calibration
) -> None:
    graph, run = ReferenceGraph(fp32_bundle / "onnx" / "target.onnx"), calibration
    found = collect(graph, graph.sites, Ranges, run)
    far = sorted(reach(one) for one in found.values())
    some = find_scales(
        graph, run, top=127.0, rule=RangeRule.MSE, smooth=False, most_reach=far[len(far) // 2]
    )
    every = find_scales(graph, run, top=127.0, rule=RangeRule.MSE, smooth=False)
    assert 0 < len(some) < len(every) == 2 * 4
    assert all(every[name] == one for name, one in some.items())


def test_inputs_that_are_always_0_have_a_scale() -> None:
    assert input_scale(Ranges.empty(4), 127.0, RangeRule.MSE) == 1.0
    np.testing.assert_array_equal(smoothing(np.zeros(3), np.ones(3)), np.ones(3))


def test_scales_are_recalled_from_their_file(tmp_path: Path) -> None:
    first, second = (InputScales(path=tmp_path / "inputs.npz") for _ in range(2))
    first.put(
        {
            "a+b": LayerInput(scale=0.5, smoothing=np.ones(3, np.float32)),
            "c": LayerInput(scale=2.0, smoothing=None),
        }
    )
    second.recall()
    for name in ("a+b", "a", "b", "c"):
        one, other = first.of(name), second.of(name)
        assert one is not None
        assert other is not None
        assert one.scale == other.scale
        assert (one.smoothing is None) == (other.smoothing is None)
    assert second.of("d") is None


# The pass


@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smoothed"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_the_engine_multiplies_what_was_rounded(
    kind: EightBits, smooth: bool, tmp_path: Path
) -> None:
    """Rounded by hand in numpy; and without the input's pair the rounded weight alone."""
    scale = layer_input(kind, smooth_of(X) if smooth else None)
    model = linear()
    assert QdqLinearPass(Qdq(kind=kind, scale_of=lambda _: scale))(model).modified
    path = save(model, "graph", WeightStore(directory=tmp_path))
    divisor = np.float32(1) if scale.smoothing is None else scale.smoothing
    steps = kind.rounded(X * (1 / divisor) / np.float32(scale.scale)).astype(np.float32)
    weight = Qdq(kind=kind, scale_of=lambda _: scale).rounded_weight(WEIGHT, scale)
    expected = (steps * np.float32(scale.scale)) @ (weight * divisor).T
    assert relative(run(path), expected) < 1e-3  # a value at a tie may fall to either side
    with exact_arithmetic(path) as exact:
        assert relative(run(exact), X @ weight.T) < 1e-5


def test_smoothing_makes_up_for_a_feature_that_reaches_far(tmp_path: Path) -> None:
    """What it says of the output's error, less than half: about 0.15 was seen."""
    errors = []
    for smooth in (smooth_of(X), None):
        scale, model = layer_input(EightBits.INT8, smooth), linear()
        QdqLinearPass(Qdq(kind=EightBits.INT8, scale_of=lambda _, s=scale: s))(model)
        path = save(model, "graph", WeightStore(directory=tmp_path))
        small = X.copy()
        small[:, 5] = 0  # else the far feature's own output hides all others'
        errors.append(relative(run(path, small), small @ WEIGHT.T))
    assert errors[0] < 0.5 * errors[1]


def test_one_input_is_rounded_once_and_unscaled_layers_stay() -> None:
    scale, model = layer_input(EightBits.INT8, None), linear(two=True)
    QdqLinearPass(Qdq(kind=EightBits.INT8, scale_of=lambda _: scale))(model)
    assert [n.op_type for n in model.graph].count("QuantizeLinear") == 1
    untouched = linear()
    assert not QdqLinearPass(Qdq(kind=EightBits.INT8, scale_of=lambda _: None))(untouched).modified


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_a_portable_decoder_computes_what_an_eager_one_with_the_same_rounding_does(
    kind: EightBits, tmp_path: Path
) -> None:
    """What TensorRT is given, in standard operators: run by ONNX Runtime's CPU.

    A value that lies within f32 noise of a tie falls to either side, and layers carry that on.
    """
    config = llama_config(hidden_size=64, intermediate_size=96)
    model, tokens = random_model(config), text(sum(CHUNKS), config.vocab_size)
    graph = portable_graph(config, 64)
    bind(graph, model)
    one = LayerInput(scale=12 / kind.top, smoothing=None)
    scales = InputScales(path=tmp_path / "inputs.npz")
    scales.put({name: one for name in model.state_dict() if "_proj" in name})
    assert QdqLinearPass(Qdq(kind=kind, scale_of=scales.of))(graph).modified
    # of each layer: q, k and v read one value, gate and up another; o; down; the head has no scale
    assert operators(graph)["QuantizeLinear"] == 4 * config.num_hidden_layers
    assert operators(graph)["DequantizeLinear"] == (4 + 7) * config.num_hidden_layers
    found = in_chunks(written(graph, "graph", tmp_path), config, 64, tokens)
    plain = eager_logits(model, tokens)
    _round_like(model, kind, one)
    expected = eager_logits(model, tokens)
    assert relative(found, expected) < 0.2 * relative(plain, expected)


def _round_like(model: PreTrainedModel, kind: EightBits, one: LayerInput) -> None:
    """Weights and inputs of an eager model's projections, by hand."""

    def rounded(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        steps = kind.rounded(inputs[0].numpy() / np.float32(one.scale)).astype(np.float32)
        return torch.from_numpy(steps * np.float32(one.scale))

    qdq = Qdq(kind=kind, scale_of=lambda _: one)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and "_proj" in name:
            weight = qdq.rounded_weight(layer.weight.numpy(), one)
            layer.weight.data = torch.from_numpy(weight)
            layer.register_forward_pre_hook(rounded)


# Bundles


def test_a_bundle_of_8_bit_products_passes_its_gates(
    kept_traces: None, tiny_target: Path, tiny_draft: Path, fp32_bundle: Path, tmp_path: Path
) -> None:
    request = BuildRequest(
        target=str(tiny_target),
        draft=str(tiny_draft),
        out=tmp_path / "bundle",
        precision="int8-smoothquant",
        max_draft_tokens=K,
        calibration=CalibrationRequest(cache=tmp_path / "cache"),
    )
    bundle = Bundle.load(build(request))
    gates = {g.name: g for g in bundle.manifest.gates}
    assert {g.status for g in gates.values()} == {"passed"}
    assert float(gates["target parity"].figures["drift_kl"]) < 0.3  # 0.13 seen
    errors = weight_errors(bundle.path, fp32_bundle)
    assert len(errors) == 2 * 4 + 2
    assert 0 < max(errors.values()) < 0.03
    again: list[str] = []
    build(replace(request, out=tmp_path / "again"), again.append)
    assert any("calibrated before" in line for line in again)


def test_recipes_that_a_backend_cannot_carry_are_refused(tiny_target: Path, tmp_path: Path) -> None:
    """fp8 is of engines alone: ONNX Runtime's CPU would compute it in f32."""
    request = BuildRequest(
        target=str(tiny_target), draft=None, out=tmp_path / "bundle", precision="fp8"
    )
    message = r"--precision: received 'fp8' with --backend onnxruntime.*Expected one of fp32, int8"
    with pytest.raises(BuildError, match=message + r".*--backend tensorrt or tensorrt-rtx"):
        build(request)
    draft = replace(request, precision="int8", draft_precision="fp16")
    with pytest.raises(BuildError, match=r"--draft-precision: received 'fp16' with"):
        build(draft)
    assert len(PRECISIONS) <= 8
