"""Sizes and row numbers as inputs: a graph that computes with shapes is computed on the CPU.

ONNX Runtime puts whatever reads a Shape on its CPU provider, since it is faster there. That is a
fallback to the CPU in the eyes of `session.disable_cpu_ep_fallback`, and what is computed so isn't
part of a captured CUDA graph. So what a decoder needs to know of a call comes from outside:

    num_logits [] i64   →  logit_rows [num_logits] i64   query rows that are projected
    Shape(input_ids)    →  query_rows [query_len] i64    0, 1, 2, …
    past + query_len    →  total_length [1] i32          cache rows that attention may look at

The last lies in the host's memory, where attention wants it. It is an upper bound: how many rows
are valid is in `seqlens_k`, a tensor of the device. So a captured call serves every length up to
its bucket.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from runtime.contract import NUM_LOGITS, TensorSpec
from runtime.provider_contract import LOGIT_ROWS, QUERY_ROWS, TOTAL_LENGTH

from ..matching import constant_of, drop_dead, is_constant, producer
from ..weights import constant

_SEQLENS, _TOTAL = 5, 6  # inputs of GroupQueryAttention


class RowInputsPass(ir.passes.InPlacePass):
    """Requires lowered attention; ensures that no size of `input_ids` is computed with."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        if any(value.name == QUERY_ROWS.name for value in graph.inputs):
            return ir.passes.PassResult(model, modified=False)
        rows, logits, total = (_input(spec) for spec in (QUERY_ROWS, LOGIT_ROWS, TOTAL_LENGTH))
        for node in [node for node in graph if node.op_type == "Range"]:
            if (new := _stands_for(node, rows, logits)) is not None:
                node.outputs[0].replace_all_uses_with(new)
        for node in [node for node in graph if node.op_type == "Reshape"]:
            _fix_shape(graph, node)
        _tell_attention(graph, rows, total)
        kept = [value for value in graph.inputs if value.name != NUM_LOGITS.name]
        graph.inputs.clear()
        graph.inputs.extend([*kept, rows, logits, total])
        drop_dead(model)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        left = [n.name for n in model.graph if n.op_type == "Shape" and _of_ids(n.inputs[0])]
        if left:
            raise ir.passes.PostconditionError(f"sizes that are computed with: {left[:3]}")


def _input(spec: TensorSpec) -> ir.Value:
    return ir.val(spec.name, ir.DataType[spec.dtype.upper()], list(spec.axes))


def _of_ids(value: ir.Value | None) -> bool:
    return value is not None and value.name == "input_ids"


def _is_query_len(value: ir.Value | None) -> bool:
    node = producer(value, "Shape", "Squeeze", "Cast", "Identity", "Reshape")
    if node is None:
        return False
    if node.op_type == "Shape":
        start = node.attributes.get("start")
        return _of_ids(node.inputs[0]) and start is not None and start.as_int() == 1
    return _is_query_len(node.inputs[0])


def _stands_for(node: ir.Node, rows: ir.Value, logits: ir.Value) -> ir.Value | None:
    """Of a Range up to the number of query rows: all of them, or the last that are projected."""
    start, limit, step = node.inputs
    if not _is_query_len(limit) or not is_constant(step, [1]):
        return None
    if is_constant(start, [0]):
        return rows
    back = producer(start, "Sub")
    return logits if back is not None and _is_query_len(back.inputs[0]) else None


def _fix_shape(graph: ir.Graph, node: ir.Node) -> None:
    """A computed shape as a constant: 0 copies an axis, and one may follow from the rest.

    Rows that were flattened come back as one sequence: a bundle decodes one at a time.
    """
    x, made = node.inputs[0], node.outputs[0]
    if constant_of(node.inputs[1]) is not None or x is None or not x.shape or not made.shape:
        return
    sizes = [_size(x, i, size) for i, size in enumerate(made.shape)]
    if sizes[:2] == [-1, -1]:
        sizes[0] = 1
    if sizes.count(-1) > 1:
        return
    name = "outrider.shape." + "_".join(map(str, sizes))
    node.replace_input_with(1, constant(graph, name, np.array(sizes, np.int64)))
    node.attributes.pop("allowzero", None)


def _size(x: ir.Value, axis: int, size: int | ir.SymbolicDim) -> int:
    if isinstance(size, int):
        return size
    assert x.shape is not None
    return 0 if axis < len(x.shape) and x.shape[axis] == size else -1


def _tell_attention(graph: ir.Graph, rows: ir.Value, total: ir.Value) -> None:
    """`seqlens_k` is the number of the last row in the cache, by the operator's definition."""
    nodes = [node for node in graph if node.op_type == "GroupQueryAttention"]
    if not nodes:
        return
    past = next(value for value in graph.inputs if value.name == "past_lengths")
    end = constant(graph, "outrider.last_row", np.array([-1], np.int64))
    last = ir.node("Gather", [rows, end], {"axis": 0})
    wide = ir.node("Cast", [past], {"to": ir.DataType.INT64})
    ends = ir.node("Add", [wide.outputs[0], last.outputs[0]])
    seqlens = ir.node("Cast", [ends.outputs[0]], {"to": ir.DataType.INT32})
    made = [last, wide, ends, seqlens]
    for one, dtype in zip(made, ("INT64", "INT64", "INT64", "INT32"), strict=True):
        one.outputs[0].type = ir.TensorType(ir.DataType[dtype])
    graph.insert_before(graph[0], made)
    for node in nodes:
        node.replace_input_with(_SEQLENS, seqlens.outputs[0])
        node.replace_input_with(_TOTAL, total)
