"""What attention over a tree of query rows is given besides: each row's position, and a bias.

The bias holds −∞ where a row may not look: at nodes that are not its ancestors, and beyond a
window, counted in positions. Made once at the graph's head, for all layers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..weights import constant


class TreeAttention:
    """`runtime.contract.DEPTHS` and `VISIBLE` → inputs 9 and 10 of GroupQueryAttention."""

    def __init__(
        self,
        graph: ir.Graph,
        past_lengths: ir.Value,  # [batch] i32
        depths: ir.Value,  # [batch, tree_len] i64
        visible: ir.Value,  # [batch, query_len, tree_len] bool
        total: ir.Value,  # [] i32, columns that attention reads
    ) -> None:
        self._ops = _Ops(graph, _last_of(graph, total))
        self._visible = visible
        op = self._ops
        query_len = op.node("Shape", visible, start=1, end=2)
        self._tree_len = op.node("Shape", visible, start=2, end=3)
        ahead = op.node("Sub", self._tree_len, query_len)
        past = op.node("Unsqueeze", op.cast(past_lengths, ir.DataType.INT64), op.i64([1]))
        first = op.node("Sub", past, ahead)  # [batch, 1]
        own = op.node("Slice", depths, ahead, op.i64([2**31 - 1]), op.i64([1]))
        self.positions = op.node("Add", first, own)  # [batch, query_len]
        self.positions.type = ir.TensorType(ir.DataType.INT64)
        columns = op.node("Range", op.i64(0), op.cast(total, ir.DataType.INT64), op.i64(1))
        self._offset = op.node("Sub", columns, first)  # [batch, total]
        self._before = op.node("Less", self._offset, op.i64(0))
        last = op.node("Sub", self._tree_len, op.i64([1]))
        self._inside = op.node("Min", op.node("Max", self._offset, op.i64(0)), last)
        depth = op.node("GatherElements", depths, self._inside, axis=1)
        at = op.node("Add", first, depth)
        self._at = op.node("Where", self._before, columns, at)  # position of each column
        self._biases: dict[int, ir.Value] = {}

    @classmethod
    def of(cls, graph: ir.Graph, total: ir.Value) -> TreeAttention | None:
        """None where the graph's rows are a chain."""
        inputs = {value.name: value for value in graph.inputs}
        if "visible" not in inputs:
            return None
        return cls(graph, inputs["past_lengths"], inputs["depths"], inputs["visible"], total)

    def inputs(self, window: int, *, turns: bool) -> list[ir.Value | None]:
        """position_ids, where attention turns by them, and attention_bias."""
        if window not in self._biases:
            self._biases[window] = self._bias(window)
        return [self.positions if turns else None, self._biases[window]]

    def _bias(self, window: int) -> ir.Value:
        """[batch, 1, query_len, total] f32: 0 or −∞."""
        op = self._ops
        wide = op.node(
            "Concat",
            op.i64([1]),
            op.node("Shape", self._visible, start=1, end=2),
            op.i64([1]),
            axis=0,
        )
        index = op.node("Expand", op.node("Unsqueeze", self._inside, op.i64([1])), wide)
        within = op.node("Less", self._offset, self._tree_len)
        seen = op.node("GatherElements", self._visible, index, axis=2)
        seen = op.node("And", seen, op.node("Unsqueeze", within, op.i64([1])))
        seen = op.node("Or", seen, op.node("Unsqueeze", self._before, op.i64([1])))
        if window:
            low = op.node("Sub", self.positions, op.i64(window))
            near = op.node(
                "Greater",
                op.node("Unsqueeze", self._at, op.i64([1])),
                op.node("Unsqueeze", low, op.i64([2])),
            )
            seen = op.node("And", seen, near)
        bias = op.node("Where", seen, op.f32(0.0), op.f32(float("-inf")))
        bias = op.node("Unsqueeze", bias, op.i64([1]))
        bias.type = ir.TensorType(ir.DataType.FLOAT)
        return bias


class _Ops:
    """Nodes one behind the other, behind `after`."""

    def __init__(self, graph: ir.Graph, after: ir.Node) -> None:
        self._graph = graph
        self._after = after

    def node(self, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes)
        self._graph.insert_after(self._after, node)
        self._after = node
        return node.outputs[0]

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.node("Cast", value, to=dtype)

    def i64(self, value: int | list[int]) -> ir.Value:
        flat = "_".join(map(str, value)) + "_" if isinstance(value, list) else str(value)
        return constant(self._graph, f"tree.{flat}", np.array(value, np.int64))

    def f32(self, value: float) -> ir.Value:
        return constant(self._graph, f"tree.{value}", np.array(value, np.float32))


def _last_of(graph: ir.Graph, value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    assert node.graph is graph
    return node
