"""Small questions that passes ask of a graph: who made this, what constant is that."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that made `value`, if it is one of `op_types`."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in op_types else None


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """The value of a small constant (initializer or Constant node), else None."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > 64:
        return None
    return tensor.numpy()


def is_constant(value: ir.Value | None, expected: object) -> bool:
    found = constant_of(value)
    return found is not None and np.array_equal(found.reshape(-1), np.ravel(np.asarray(expected)))


def operands(node: ir.Node) -> tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]]:
    """Both orders of a commutative node's two inputs."""
    first, second = node.inputs[0], node.inputs[1]
    assert first is not None
    assert second is not None
    return (first, second), (second, first)


def sole_consumer(value: ir.Value, *op_types: str) -> ir.Node | None:
    """The only reader of `value`, if there is just one and it is one of `op_types`."""
    users = {use.node for use in value.uses()}
    if len(users) != 1 or value.is_graph_output():
        return None
    (node,) = users
    return node if node.op_type in op_types else None


def last_dim(value: ir.Value) -> int | None:
    if value.shape is None or len(value.shape) == 0:
        return None
    size = value.shape[-1]
    return size if isinstance(size, int) else None


def attribute(node: ir.Node, name: str, default: object = None) -> object:
    attr = node.attributes.get(name)
    return default if attr is None else attr.value


def slice_of(value: ir.Value | None) -> tuple[ir.Value, int, int, int] | None:
    """(source, start, end, step) of a slice along the last axis, with the end made plain."""
    node = producer(value, "Slice")
    source = node.inputs[0] if node is not None else None
    if node is None or source is None or source.shape is None:
        return None
    rank, size = len(source.shape), source.shape[-1]
    numbers = [constant_of(i) for i in node.inputs[1:]]
    if not isinstance(size, int) or len(numbers) != 4 or any(n is None for n in numbers):
        return None
    start, end, axis, step = (int(np.ravel(n)[0]) for n in numbers)  # type: ignore[arg-type]
    if axis not in (-1, rank - 1) or node.inputs[3] is None:
        return None
    if not is_constant(node.inputs[3], [axis]):
        return None
    start = start + size if start < 0 else start
    end = end + size if end < 0 else min(end, size)
    return source, start, end, step


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of `old` read `new`; a graph output keeps its name and place."""
    if new.shape is None:
        new.shape = old.shape
    if new.type is None:
        new.type = old.type
    name, is_output = old.name, old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if is_output:
        old.name = f"{name}.replaced"
        new.name = name


def drop_dead(model: ir.Model) -> None:
    RemoveUnusedNodesPass()(model)
