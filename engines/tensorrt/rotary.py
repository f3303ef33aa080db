"""RoPE as the standard's operator, on the graph's own angles.

The traced graph computes cos and sin in f32 from positions, with whatever scaling the model's code
has; they stay as they are. Only the turning of queries and keys becomes `RotaryEmbedding`, which
wants one angle a pair: half of what the trace made, where both halves are the same tensor.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..matching import constant_of, drop_dead, producer, replace
from ..onnxruntime.rotary import Rotary, match_rotary
from ..weights import constant

_ELEMENTWISE = ("Cos", "Sin", "Cast", "Identity", "Unsqueeze")


class RotaryEmbeddingPass(ir.passes.InPlacePass):
    """Leaves a rotation spelled out where its angles aren't seen to be equal in pairs."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        tables: dict[ir.Value, ir.Value] = {}
        found = 0
        for node in list(model.graph):
            rotary = match_rotary(node.outputs[0]) if node.op_type in ("Add", "Concat") else None
            if rotary is None or not _one_angle_a_pair(rotary):
                continue
            _turn(model.graph, node, rotary, tables)
            found += 1
        if found:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(found))


def _one_angle_a_pair(rotary: Rotary) -> bool:
    known = _repeated_pairs if rotary.interleaved else _joined_halves
    angles = (rotary.cos, rotary.sin)
    return all(_is_table(v) and known(_angle(v)) for v in angles)


def _is_table(value: ir.Value) -> bool:
    """[batch, 1, query_len, rotary_dim]"""
    return value.shape is not None and len(value.shape) == 4 and value.shape[1] == 1


def _angle(value: ir.Value | None) -> ir.Value | None:
    """What was repeated for both halves, behind what is done to each element alone."""
    while (node := producer(value, *_ELEMENTWISE, "Mul")) is not None:
        inputs = [v for v in node.inputs if v is not None]
        if node.op_type == "Mul":
            inputs = [v for v in inputs if not _is_scalar(v)]
            if len(inputs) != 1:
                break
        value = inputs[0]
    return value


def _is_scalar(value: ir.Value) -> bool:
    found = constant_of(value)
    return found is not None and found.size == 1


def _joined_halves(value: ir.Value | None) -> bool:
    concat = producer(value, "Concat")
    return concat is not None and len(concat.inputs) == 2 and concat.inputs[0] is concat.inputs[1]


def _repeated_pairs(value: ir.Value | None) -> bool:
    """x → [..., n, 1] → [..., n, 2] → [..., 2 n]"""
    merged = producer(value, "Reshape")
    spread = producer(merged.inputs[0], "Expand", "Tile", "Concat") if merged else None
    if spread is None:
        return False
    if spread.op_type == "Concat":
        return len(spread.inputs) == 2 and spread.inputs[0] is spread.inputs[1]
    column = producer(spread.inputs[0], "Unsqueeze")
    return column is not None and spread.op_type == "Expand"


def _turn(graph: ir.Graph, node: ir.Node, rotary: Rotary, tables: dict[ir.Value, ir.Value]) -> None:
    for angle in (rotary.cos, rotary.sin):
        if angle not in tables:
            tables[angle] = _half(graph, angle, rotary)
    attributes: dict[str, object] = {"interleaved": int(rotary.interleaved)}
    size = rotary.x.shape[-1] if rotary.x.shape is not None else None
    if size != rotary.rotary_dim:
        attributes["rotary_embedding_dim"] = rotary.rotary_dim
    turned = ir.node(
        "RotaryEmbedding", [rotary.x, tables[rotary.cos], tables[rotary.sin]], attributes
    )
    graph.insert_before(node, turned)
    replace(node.outputs[0], turned.outputs[0])


def _half(graph: ir.Graph, angle: ir.Value, rotary: Rotary) -> ir.Value:
    """[batch, 1, query_len, rotary_dim] → [batch, query_len, rotary_dim / 2], right behind it."""
    producing = angle.producer()
    assert producing is not None
    assert angle.shape is not None
    half, step = rotary.rotary_dim // 2, 2 if rotary.interleaved else 1
    end = rotary.rotary_dim if rotary.interleaved else half
    numbers = [
        constant(graph, f"outrider.i64.{n}", np.array([n], np.int64)) for n in (0, end, 3, step, 1)
    ]
    cut = ir.node("Slice", [angle, *numbers[:4]])
    flat = ir.node("Squeeze", [cut.outputs[0], numbers[4]])
    batch, _, rows, _ = angle.shape
    cut.outputs[0].shape = ir.Shape([batch, 1, rows, half])
    flat.outputs[0].shape = ir.Shape([batch, rows, half])
    for one in (cut, flat):
        one.outputs[0].type = angle.type
    graph.insert_after(producing, [cut, flat])
    return flat.outputs[0]
