"""Arithmetic between weights alone, done once when they are written instead of in every run.

Gemma's norms multiply by `1 + weight`. The traced graph has the addition, because a trace has no
weights; here it becomes one more weight that says how it is made.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from .matching import constant_of, drop_dead
from .weights import Array, array, is_weight, lazy, shape

_Operation = Callable[..., Array]
_OPERATIONS: dict[str, tuple[str, _Operation]] = {
    "Add": ("+", np.add),
    "Sub": ("-", np.subtract),
    "Mul": ("*", np.multiply),
    "Div": ("/", np.divide),
}


class FoldWeightExpressionsPass(ir.passes.InPlacePass):
    """Ensures that no weight is added to or multiplied by a scalar while the graph runs."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = False
        for node in list(model.graph):
            folded = _folded(model.graph, node)
            if folded is not None:
                node.outputs[0].replace_all_uses_with(folded)
                changed = True
        if changed:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=changed)


def _folded(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """`weight ∘ scalar` or `scalar ∘ weight` as a weight of the same shape; None for all else."""
    if node.op_type not in _OPERATIONS or node.outputs[0].is_graph_output():
        return None
    sign, operation = _OPERATIONS[node.op_type]
    left, right = node.inputs
    if left is None or right is None:
        return None
    for weight, other in ((left, right), (right, left)):
        number = _scalar(other)
        if number is None or not _is_lazy_vector(weight):
            continue
        if weight is left:
            name, make = f"({weight.name} {sign} {number})", _right(operation, weight, number)
        else:
            name, make = f"({number} {sign} {weight.name})", _left(operation, number, weight)
        return lazy(graph, name, make, ir.DataType.FLOAT, shape(weight))
    return None


def _right(operation: _Operation, weight: ir.Value, number: np.float32) -> Callable[[], Array]:
    return lambda: operation(array(weight), number)


def _left(operation: _Operation, number: np.float32, weight: ir.Value) -> Callable[[], Array]:
    return lambda: operation(number, array(weight))


def _scalar(value: ir.Value) -> np.float32 | None:
    found = constant_of(value)
    return np.float32(found.reshape(())) if found is not None and found.size == 1 else None


def _is_lazy_vector(value: ir.Value) -> bool:
    """A norm's weight, bytes still to come. A matrix keeps its checkpoint name, which gates ask."""
    return (
        is_weight(value)
        and value.dtype == ir.DataType.FLOAT
        and isinstance(value.const_value, ir.LazyTensor)
        and len(shape(value)) == 1
    )
