"""Attention with a soft cap, spelled out: TensorRT's attention has none.

softmax(cap · tanh(q kᵀ · scale / cap) masked) v, the queries of one KV head together
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..matching import attribute, replace
from ..weights import constant


class SoftCapPass(ir.passes.InPlacePass):
    """Requires static head counts; ensures that no attention has a soft cap."""

    def requires(self, model: ir.Model) -> None:
        for node in _capped(model):
            if len(node.inputs) != 4 or any(value is None for value in node.inputs):
                raise ir.passes.PreconditionError(f"{node.name}: soft cap without a mask")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = _capped(model)
        for node in found:
            _spell_out(model.graph, node)
            model.graph.remove(node, safe=True)
        return ir.passes.PassResult(model, modified=bool(found))

    def ensures(self, model: ir.Model) -> None:
        if left := _capped(model):
            raise ir.passes.PostconditionError(f"soft caps left over: {[n.name for n in left[:3]]}")


def _capped(model: ir.Model) -> list[ir.Node]:
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    return [node for node in nodes if attribute(node, "softcap", 0.0)]


def _spell_out(graph: ir.Graph, node: ir.Node) -> None:
    query, key, value, mask = (v for v in node.inputs if v is not None)
    heads, kv_heads, size = (_static(query, 1), _static(key, 1), _static(query, 3))
    cap = float(attribute(node, "softcap"))  # type: ignore[arg-type]
    scale = float(attribute(node, "scale", size**-0.5))  # type: ignore[arg-type]
    build = _Builder(graph, node)
    groups = np.array([0, kv_heads, heads // kv_heads, -1, size], np.int64)
    grouped = build("Reshape", query, build.vector(groups))  # [b, kv, group, q, d]
    keys = build("Unsqueeze", key, build.vector(np.array([2], np.int64)))
    values = build("Unsqueeze", value, build.vector(np.array([2], np.int64)))
    turned = build("Transpose", keys, perm=[0, 1, 2, 4, 3])
    scores = build("MatMul", build("Mul", grouped, build.scalar(scale / cap)), turned)
    scores = build("Mul", build("Tanh", scores), build.scalar(cap))
    # Of every type that a score may have, this is far below any capped one.
    seen = build("Unsqueeze", mask, build.vector(np.array([1], np.int64)))
    masked = build("Where", seen, scores, build.scalar(-1e4))
    weights = build("Softmax", masked, axis=-1)
    merged = np.array([0, heads, -1, size], np.int64)
    out = build("Reshape", build("MatMul", weights, values), build.vector(merged))
    replace(node.outputs[0], out)


def _static(value: ir.Value, axis: int) -> int:
    assert value.shape is not None
    size = value.shape[axis]
    if not isinstance(size, int):
        raise ir.passes.PreconditionError(f"{value.name}: axis {axis} is not static: {value.shape}")
    return size


class _Builder:
    """Appends f32 nodes before one node."""

    def __init__(self, graph: ir.Graph, before: ir.Node) -> None:
        self._graph, self._before = graph, before

    def __call__(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        if op_type == "Unsqueeze" and inputs[0].type is not None:
            node.outputs[0].type = inputs[0].type
        self._graph.insert_before(self._before, node)
        return node.outputs[0]

    def scalar(self, number: float) -> ir.Value:
        array = np.array(number, np.float32)
        return constant(self._graph, f"outrider.scalar.{number!r}", array)

    def vector(self, array: np.ndarray) -> ir.Value:
        name = "outrider.vector." + "_".join(map(str, array.tolist()))
        return constant(self._graph, name, array)
