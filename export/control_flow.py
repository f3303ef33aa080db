"""Conditions for graphs written with onnxscript's builder: work that is skipped costs nothing.

That is what keeps greedy rounds and short nucleus cuts cheap. Invariant: there is no If. TensorRT
fails to build a Loop or an If inside an If, but builds Loops at any depth, so a condition is a
Loop of at most one turn, and every Loop states its condition, which TensorRT's parser requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir

Axes = Sequence[str | int | None]
Values = Sequence[ir.Value]


class Op(Protocol):
    """onnxscript's OpBuilder as type checkers see it: an attribute is an operator."""

    @property
    def builder(self) -> Any: ...
    def initializer(self, tensor: ir.TensorProtocol) -> ir.Value: ...
    def TopK(self, *inputs: object, **attributes: object) -> Values: ...
    def Loop(self, *inputs: object, **attributes: object) -> Any: ...
    def __getattr__(self, name: str) -> Callable[..., ir.Value]: ...


@dataclass(frozen=True, kw_only=True)
class Like:
    """Type and axes of one value that a Loop carries."""

    dtype: ir.DataType
    axes: Axes

    def apply(self, value: ir.Value) -> ir.Value:
        value.dtype = self.dtype
        value.shape = ir.Shape(self.axes)
        return value

    def fresh(self, name: str) -> ir.Value:
        return self.apply(ir.Value(name=name))


def f32(*axes: str | int | None) -> Like:
    return Like(dtype=ir.DataType.FLOAT, axes=axes)


def i64(*axes: str | int | None) -> Like:
    return Like(dtype=ir.DataType.INT64, axes=axes)


def when(
    op: Op,
    condition: ir.Value,  # [] bool
    otherwise: Values,
    compute: Callable[[Op], Values],
    results: Sequence[Like],
) -> Values:
    """Compute values only where the condition holds; `otherwise` stands in for them."""

    def once(inner: Op, *_: ir.Value) -> tuple[ir.Value, Values]:
        return condition, compute(inner)

    return repeat(op, condition, otherwise, once, results, at_most=1)


def repeat(
    op: Op,
    condition: ir.Value,  # [] bool: whether to enter at all
    state: Values,
    step: Callable[..., tuple[ir.Value, Values]],  # (op, *state) -> (go on, new state)
    like: Sequence[Like],
    *,
    at_most: int,
) -> Values:
    """Loop while the condition holds, carrying `state`; returns the last state."""

    def body(inner: Op, _: ir.Value, __: ir.Value, *carried: ir.Value) -> Values:
        go_on, new_state = step(inner, *carried)
        return _own(inner, [go_on, *new_state])

    scalar = [i64(), Like(dtype=ir.DataType.BOOL, axes=())]
    inputs = [one.fresh(f"loop_in_{i}") for i, one in enumerate([*scalar, *like])]
    outputs = [one.fresh("") for one in [scalar[1], *like]]
    # A scope of its own keeps the names of its nodes and values unique in the model.
    op.builder.push_module(f"loop_{op.builder.graph.num_nodes()}")
    graph = op.builder.subgraph(body, inputs, outputs, name="loop")
    op.builder.pop_module()
    values = op.Loop(at_most, condition, *state, body=graph, _outputs=len(state))
    return [one.apply(value) for one, value in zip(like, _listed(values), strict=True)]


def _listed(values: ir.Value | Values) -> Values:
    return [values] if isinstance(values, ir.Value) else values


def _own(op: Op, values: Values) -> Values:
    """A Loop's body must produce its results itself, even one that is an outer value."""
    here = op.builder.graph
    return [v if v.graph is here else op.Identity(v) for v in values]
