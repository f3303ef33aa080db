"""Gates can fail: each planted fault fails the build by the gate's name and leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from helpers_build import build_bundle

from export import gates, graphs
from runtime.errors import GateFailed

Fault = Callable[[ir.Model], None]

pytestmark = pytest.mark.usefixtures("kept_traces")


def lower_with(monkeypatch: pytest.MonkeyPatch, fault: Fault, *, draft: bool = False) -> None:
    """Plant `fault` into what the lowering made of the target, or of the draft."""
    lower, lowered = graphs.lower, []

    def faulty(model: ir.Model, *arguments: object) -> ir.Model:
        result = lower(model, *arguments)  # type: ignore[arg-type]
        if len(lowered) == draft:
            fault(model)
        lowered.append(model)
        return result

    monkeypatch.setattr(graphs, "lower", faulty)


def attention(model: ir.Model) -> list[ir.Node]:
    found = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert found
    return found


def set_constant(model: ir.Model, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    value = model.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(change(value.const_value.numpy()), name=name)


def shifted_rope_table(model: ir.Model) -> None:
    set_constant(model, "rotary.0.cos", lambda table: np.roll(table, 1, axis=0))


def short_window(model: ir.Model) -> None:
    for node in attention(model):
        node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 16)


def other_scale(model: ir.Model) -> None:
    node = attention(model)[-1]
    scale = node.attributes["scale"].as_float()
    node.attributes["scale"] = ir.AttrFloat32("scale", scale * 1.05)


def permuted_query_rows(model: ir.Model) -> None:
    """Two heads' rows of the first layer's query projection, swapped."""
    name = next(n for n in model.graph.initializers if "layers.0.self_attn.q_proj" in n)
    value = model.graph.initializers[name]
    original = value.const_value
    assert original is not None

    def swapped() -> ir.TensorProtocol:
        weight = original.numpy().copy()  # [in, out of q, k and v]
        weight[:, [0, 16]] = weight[:, [16, 0]]
        return ir.tensor(weight)

    value.const_value = ir.LazyTensor(swapped, dtype=original.dtype, shape=original.shape)


@pytest.mark.parametrize(
    "fault", [shifted_rope_table, short_window, other_scale, permuted_query_rows]
)
@pytest.mark.parametrize("model", ["target", "draft"])
def test_parity_sees_a_graph_that_is_not_the_model(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_target: Path,
    tiny_draft: Path,
    fault: Fault,
    model: str,
) -> None:
    lower_with(monkeypatch, fault, draft=model == "draft")
    with pytest.raises(GateFailed, match=f"gate {model} parity: received a relative error of"):
        build_bundle(tmp_path / "bundle", tiny_target, tiny_draft, "fp32")
    assert list(tmp_path.iterdir()) == []


def scaled_logits(model: ir.Model, factor: Callable[[ir.Graph], ir.Value]) -> None:
    """Multiply the logits by a scalar that the graph computes."""
    graph = model.graph
    index = next(i for i, value in enumerate(graph.outputs) if value.name == "logits")
    logits = graph.outputs[index]
    logits.name = "logits.right"
    node = ir.node("Mul", [logits, factor(graph)])
    (result,) = node.outputs
    result.name, result.shape, result.type = "logits", logits.shape, logits.type
    graph.append(node)
    graph.outputs[index] = result


def append(graph: ir.Graph, op_type: str, inputs: list[ir.Value], **attributes: object) -> ir.Value:
    node = ir.node(op_type, inputs, attributes)  # type: ignore[arg-type]
    graph.append(node)
    return node.outputs[0]


def scalar(graph: ir.Graph, value: float | int) -> ir.Value:
    dtype = np.float32 if isinstance(value, float) else np.int64
    tensor = ir.tensor(np.array(value, dtype))
    node = ir.node("Constant", [], {"value": tensor})
    graph.append(node)
    return node.outputs[0]


def single_rows_are_others(model: ir.Model) -> None:
    def factor(graph: ir.Graph) -> ir.Value:
        ids = next(value for value in graph.inputs if value.name == "input_ids")
        rows = append(graph, "ReduceMax", [append(graph, "Shape", [ids], start=1)], keepdims=0)
        single = append(graph, "Equal", [rows, scalar(graph, 1)])
        return append(graph, "Where", [single, scalar(graph, 1.01), scalar(graph, 1.0)])

    scaled_logits(model, factor)


def reads_beyond_its_length(model: ir.Model) -> None:
    """The first row behind the valid ones: zeros, until a rollback leaves something there."""

    def factor(graph: ir.Graph) -> ir.Value:
        cache = next(value for value in graph.outputs if value.name == "present.0.value")
        total = next(v for n in graph for v in n.outputs if v.name == "total_length")
        row = append(graph, "Gather", [cache, total], axis=2)
        return append(
            graph,
            "Add",
            [append(graph, "ReduceMax", [row], keepdims=0), scalar(graph, 1.0)],
        )

    scaled_logits(model, factor)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (single_rows_are_others, "gate rows: 5 rows at once differ from row by row"),
        (reads_beyond_its_length, "gate rollback: the logits after a rollback differ"),
    ],
)
def test_rows_and_rollback(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_target: Path,
    tiny_draft: Path,
    fault: Fault,
    message: str,
) -> None:
    """Faults that a comparison with the eager model can't see."""
    lower_with(monkeypatch, fault)
    with pytest.raises(GateFailed, match=message):
        build_bundle(tmp_path / "bundle", tiny_target, tiny_draft, "fp32")
    assert list(tmp_path.iterdir()) == []


def test_engine_noise_is_held_to_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_target: Path, tiny_draft: Path
) -> None:
    """int4 multiplies by rounded activations: the gate sees it, within a limit that allows it."""
    monkeypatch.setitem(gates.ENGINE, "int4", 1e-6)
    with pytest.raises(GateFailed, match=r"gate engine: .* at most 1e-06"):
        build_bundle(tmp_path / "bundle", tiny_target, tiny_draft, "int4")
    assert list(tmp_path.iterdir()) == []
