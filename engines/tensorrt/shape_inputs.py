"""Sizes that a call chooses, as inputs of which only the shape is read.

An engine's shapes are chosen when a call is bound, and a captured CUDA graph keeps them. A size
that came as a *value* would have to be read back to the host in every call; so a count becomes the
length of an input vector whose contents nobody reads.

    num_logits [] i64          →  logit_slots [num_logits] i32     rows that are projected
    (new)                         context_slots [context] i32      cache rows that attention reads
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from runtime import engine_contract

from ..weights import constant

LOGIT_SLOTS = engine_contract.LOGIT_SLOTS.name
CONTEXT_SLOTS = engine_contract.CONTEXT_SLOTS.name


class LogitSlotsPass(ir.passes.InPlacePass):
    """Ensures that `num_logits` is no input: its value is the length of `logit_slots`."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        count = next((v for v in graph.inputs if v.name == "num_logits"), None)
        if count is None:
            return ir.passes.PassResult(model, modified=False)
        slots, size, nodes = _size_input(graph, LOGIT_SLOTS, "num_logits")
        axes = constant(graph, "outrider.axis_0", np.array([0], np.int64))
        scalar = ir.node("Squeeze", [size, axes])
        scalar.outputs[0].shape, scalar.outputs[0].type = ir.Shape([]), count.type
        graph.insert_before(graph[0], [*nodes, scalar])
        count.replace_all_uses_with(scalar.outputs[0])
        graph.inputs[list(graph.inputs).index(count)] = slots
        return ir.passes.PassResult(model, modified=True)


class ContextBucketPass(ir.passes.InPlacePass):
    """Ensures that attention reads the first `context` rows of the static caches, no others.

    Rows beyond the longest sequence are masked anyway: a bucket that holds every row that a call
    may see gives the same numbers. The caches themselves stay whole, and are written in place.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [node for node in graph if node.op_type == "Attention"]
        if not nodes or any(v.name == CONTEXT_SLOTS for v in graph.inputs):
            return ir.passes.PassResult(model, modified=False)
        slots, size, made = _size_input(graph, CONTEXT_SLOTS, "context")
        graph.insert_before(graph[0], made)
        graph.inputs.append(slots)
        masks: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            _read_bucket(graph, node, size, masks)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type == "Attention" and len(node.inputs) > 4:
                raise ir.passes.PostconditionError(f"{node.name}: attention with a past of its own")


def _read_bucket(
    graph: ir.Graph, node: ir.Node, size: ir.Value, masks: dict[ir.Value, ir.Value]
) -> None:
    query, key, value, mask = node.inputs
    assert query is not None
    assert key is not None
    assert value is not None
    assert mask is not None
    if mask not in masks:
        masks[mask] = _first(graph, node, mask, size, -1)
    read = [_first(graph, node, cache, size, 2) for cache in (key, value)]
    for index, new in enumerate([*read, masks[mask]], start=1):
        node.replace_input_with(index, new)


def _first(graph: ir.Graph, before: ir.Node, x: ir.Value, size: ir.Value, axis: int) -> ir.Value:
    """x[…, :context, …]"""
    assert x.shape is not None
    axis %= len(x.shape)
    zero = constant(graph, "outrider.axis_0", np.array([0], np.int64))
    axes = constant(graph, f"outrider.axis_{axis}", np.array([axis], np.int64))
    cut = ir.node("Slice", [x, zero, size, axes])
    dims = list(x.shape)
    dims[axis] = ir.SymbolicDim("context")
    cut.outputs[0].shape, cut.outputs[0].type = ir.Shape(dims), x.type
    graph.insert_before(before, cut)
    return cut.outputs[0]


def _size_input(graph: ir.Graph, name: str, axis: str) -> tuple[ir.Value, ir.Value, list[ir.Node]]:
    """The input, its length as [1] i64, and the node that reads it."""
    slots = ir.val(name, ir.DataType.INT32, [axis])
    node = ir.node("Shape", [slots], {"start": 0, "end": 1})
    node.outputs[0].shape, node.outputs[0].type = ir.Shape([1]), ir.TensorType(ir.DataType.INT64)
    return slots, node.outputs[0], [node]
