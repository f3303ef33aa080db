"""Weights that are not there yet: initializers whose bytes are made when they are written.

A build never holds the model. The traced graph's initializers have names and shapes; each pass
that transposes, joins or rescales a weight replaces it with another value that says how to make it.
Only `engines.external_data` asks for the bytes, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

Array = np.ndarray
SMALL_BYTES = 4096  # below this a weight may be looked at while rewriting (epsilons, scales)


def lazy(
    graph: ir.Graph, name: str, make: Callable[[], Array], dtype: ir.DataType, shape: Sequence[int]
) -> ir.Value:
    """Register an initializer made by `make() -> array of shape and dtype` when it is written.

    The same name twice gives the same value: two users of one expression share its storage.
    """
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.LazyTensor(
        lambda: ir.tensor(np.ascontiguousarray(make()), dtype=dtype, name=name),
        dtype=dtype,
        shape=ir.Shape(shape),
        name=name,
    )
    value = ir.Value(
        name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """Register a small initializer with its value; equal names must mean equal values."""
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.const_value is not None


def array(value: ir.Value) -> Array:
    """The bytes of a weight, made now: f32 [shape]."""
    assert value.const_value is not None  # is_weight was asked before
    return value.const_value.numpy()


def shape(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None
    return value.shape.numpy()


def transposed(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    """[a, b] → [b, a]."""
    rows, columns = shape(weight)
    return lazy(
        graph, f"{weight.name}.T", lambda: array(weight).T, ir.DataType.FLOAT, (columns, rows)
    )


def joined(graph: ir.Graph, weights: Sequence[ir.Value]) -> ir.Value:
    """Weights [n_i, ...] joined along their first axis."""
    if len(weights) == 1:
        return weights[0]
    first = shape(weights[0])
    rows = sum(shape(w)[0] for w in weights)
    name = "+".join(str(w.name) for w in weights)
    return lazy(
        graph,
        name,
        lambda: np.concatenate([array(w) for w in weights]),
        ir.DataType.FLOAT,
        (rows, *first[1:]),
    )


def zeros(graph: ir.Graph, size: int) -> ir.Value:
    return constant(graph, f"outrider.zeros.{size}", np.zeros(size, np.float32))
