"""A row's logits that don't depend on how many rows are in the call, bit for bit.

ONNX Runtime's GroupQueryAttention has one kernel for a single query row and another for more, which
differ by 1e-7; where activations are then rounded to 8 bits, that grows until greedy text with
drafts and without them parts at near ties. Two rows or more agree in every bit, whatever their
number, and so do 8-bit MatMulNBits, norms and activations. So a lone row goes into attention as
two: the second is a copy whose result is dropped, and whose key and value lie beyond the row's
length, where nothing reads them and the next row overwrites them.

It costs a plain step nothing at 64 tokens of context, 5 % at 256, 17 % at 512 and 25 % at 960
(SmolLM2-135M, int8, two threads of an EPYC with AVX2, medians of one interleaved run); rounds with
drafts cost the same as before. In 4 bits MatMulNBits has such a pair of kernels itself, so there it
would buy nothing.

Invariant: the row behind the query exists. A runtime never puts a query on the cache's last row,
since a text that fills the context has ended.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..matching import drop_dead
from ..weights import constant

_DONE = "outrider.rows_alike"
_SEQLENS, _TOTAL, _POSITIONS, _BIAS = 5, 6, 9, 10  # inputs of GroupQueryAttention


class RowsAlikePass(ir.passes.InPlacePass):
    """Requires lowered attention; ensures that none is called with a single row."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = _unpadded(model)
        if nodes:
            padding = _Padding(model.graph)
            for node in nodes:
                _pad(node, padding)
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        if _unpadded(model):
            raise ir.passes.PostconditionError("attention that may be called with a single row")


def _unpadded(model: ir.Model) -> list[ir.Node]:
    nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    return [node for node in nodes if _DONE not in node.metadata_props]


class _Padding:
    """How many rows attention gets, made once at the graph's head."""

    def __init__(self, graph: ir.Graph) -> None:
        inputs = {value.name: value for value in graph.inputs}
        self.zero, self.one, two = (
            constant(graph, f"rows_alike.{i}", np.array([i], np.int64)) for i in range(3)
        )
        one_i32 = constant(graph, "rows_alike.one_i32", np.ones(1, np.int32))
        query = ir.node("Shape", [inputs["input_ids"]], {"start": 1, "end": 2})
        rows = ir.node("Max", [query.outputs[0], two])
        shape = ir.node("Concat", [self.one, rows.outputs[0], self.one], {"axis": 0})
        rows_i32 = ir.node("Cast", [rows.outputs[0]], {"to": ir.DataType.INT32})
        totals = ir.node("Add", [inputs["past_lengths"], rows_i32.outputs[0]])
        last = ir.node("Sub", [totals.outputs[0], one_i32])
        most = ir.node("ReduceMax", [totals.outputs[0]], {"keepdims": 0})
        graph.insert_before(graph[0], [query, rows, shape, rows_i32, totals, last, most])
        self.query_len, self.shape, self.rows = (
            query.outputs[0],
            shape.outputs[0],
            rows.outputs[0],
        )
        self.seqlens_k, self.total = last.outputs[0], most.outputs[0]


def _pad_tree(node: ir.Node, padding: _Padding) -> None:
    """Positions [batch, rows] and bias [batch, 1, rows, columns] of the copy: the row's own.

    The column that is added, the copy's, lies behind the row itself, which doesn't look ahead.
    """
    if len(node.inputs) <= _BIAS:
        return
    positions, bias = node.inputs[_POSITIONS], node.inputs[_BIAS]
    ops = _Before(node)
    if positions is not None:
        flat = ops.node("Concat", padding.one, padding.rows, axis=0)
        node.replace_input_with(_POSITIONS, ops.node("Expand", positions, flat))
    if bias is not None:
        more = ops.node("Sub", padding.rows, padding.query_len)
        zeros = constant(ops.graph, "rows_alike.seven", np.zeros(7, np.int64))
        amounts = ops.node("Concat", zeros, more, axis=0)
        wide = ops.node("Pad", bias, amounts)
        tall = ops.node("Concat", padding.one, padding.one, padding.rows, padding.one, axis=0)
        node.replace_input_with(_BIAS, ops.node("Expand", wide, tall))


class _Before:
    """Nodes in front of one."""

    def __init__(self, node: ir.Node) -> None:
        assert node.graph is not None
        self.graph = node.graph
        self._node = node

    def node(self, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        new = ir.node(op_type, list(inputs), attributes)
        self.graph.insert_before(self._node, new)
        return new.outputs[0]


def _pad(node: ir.Node, padding: _Padding) -> None:
    """Repeat a lone row of each input, and keep the first rows of the result."""
    graph = node.graph
    assert graph is not None
    for i, value in enumerate(node.inputs[:3]):
        if value is not None:
            expanded = ir.node("Expand", [value, padding.shape])
            expanded.outputs[0].type = value.type
            graph.insert_before(node, expanded)
            node.replace_input_with(i, expanded.outputs[0])
    _pad_tree(node, padding)
    node.replace_input_with(_SEQLENS, padding.seqlens_k)
    node.replace_input_with(_TOTAL, padding.total)
    node.metadata_props[_DONE] = "1"
    whole = node.outputs[0]
    uses = list(whole.uses())
    kept = ir.node("Slice", [whole, padding.zero, padding.query_len, padding.one])
    kept.outputs[0].type, kept.outputs[0].shape = whole.type, whole.shape
    whole.shape = None
    graph.insert_after(node, kept)
    for use in uses:
        use.node.replace_input_with(use.idx, kept.outputs[0])
