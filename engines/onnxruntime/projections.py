"""Linear layers that read the same input become one: packed QKV, packed gate and up.

One product over the joined rows costs one dispatch and one quantization of its input, where the
separate ones cost two or three.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..matching import drop_dead, operands, producer, replace, sole_consumer
from ..weights import constant, is_weight, joined, shape, zeros


@dataclass(frozen=True, kw_only=True)
class Linear:
    """`x @ weight.T (+ bias)`: weight [out, in] as the checkpoint has it."""

    matmul: ir.Node
    x: ir.Value
    weight: ir.Value  # [out, in]
    bias: ir.Value | None  # [out]
    out: ir.Value  # after the bias


def match_linear(node: ir.Node) -> Linear | None:
    """A MatMul by a transposed weight, with the Add of a bias where one follows."""
    if node.op_type != "MatMul":
        return None
    transpose = producer(node.inputs[1], "Transpose")
    if transpose is None or not is_weight(transpose.inputs[0]) or node.inputs[0] is None:
        return None
    weight = transpose.inputs[0]
    assert weight is not None
    if len(shape(weight)) != 2:
        return None
    out, bias = node.outputs[0], None
    add = sole_consumer(out, "Add")
    if add is not None:
        for left, right in operands(add):
            if left is out and is_weight(right) and shape(right) == (shape(weight)[0],):
                out, bias = add.outputs[0], right
    return Linear(matmul=node, x=node.inputs[0], weight=weight, bias=bias, out=out)


class PackedProjectionsPass(ir.passes.InPlacePass):
    """Joins linear layers with one input; the lm_head and single readers stay as they are."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        groups: dict[ir.Value, list[Linear]] = {}
        for node in model.graph:
            linear = match_linear(node)
            if linear is not None:
                groups.setdefault(linear.x, []).append(linear)
        packed = [group for group in groups.values() if len(group) > 1]
        for group in packed:
            _pack(model.graph, group)
        if packed:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(packed))


def _pack(graph: ir.Graph, group: list[Linear]) -> None:
    first = group[0].matmul
    sizes = [shape(linear.weight)[0] for linear in group]
    weight = joined(graph, [linear.weight for linear in group])
    transpose = ir.node("Transpose", [weight], {"perm": [1, 0]})
    matmul = ir.node("MatMul", [group[0].x, transpose.outputs[0]])
    nodes = [transpose, matmul]
    if any(linear.bias is not None for linear in group):
        biases = [
            zeros(graph, size) if linear.bias is None else linear.bias
            for linear, size in zip(group, sizes, strict=True)
        ]
        nodes.append(ir.node("Add", [matmul.outputs[0], joined(graph, biases)]))
    for node in nodes[1:]:
        old = group[0].out
        assert old.shape is not None
        node.outputs[0].shape = ir.Shape([*old.shape[:-1], sum(sizes)])
        node.outputs[0].type = old.type
    name = "outrider.split." + "_".join(map(str, sizes))
    split = ir.node(
        "Split",
        [nodes[-1].outputs[0], constant(graph, name, np.array(sizes, np.int64))],
        {"axis": -1},
        num_outputs=len(sizes),
    )
    graph.insert_before(first, [*nodes, split])
    for linear, part in zip(group, split.outputs, strict=True):
        replace(linear.out, part)
