"""If and Loop for graphs written with onnxscript's builder.

A branch that is not taken costs nothing, which is what keeps greedy rounds and short nucleus cuts
cheap. Invariant: both arms of a branch return the same types and axes, and a Loop states its
condition, since TensorRT's parser refuses a Loop without one.
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
    def If(self, *inputs: object, **attributes: object) -> Any: ...
    def Loop(self, *inputs: object, **attributes: object) -> Any: ...
    def __getattr__(self, name: str) -> Callable[..., ir.Value]: ...


@dataclass(frozen=True, kw_only=True)
class Like:
    """Type and axes of one result of a branch or loop."""

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


def branch(
    op: Op,
    condition: ir.Value,  # [] bool
    then: Callable[[Op], Values],
    otherwise: Callable[[Op], Values],
    results: Sequence[Like],
) -> Values:
    """If: the arms read outer values directly and return one value per entry of `results`."""
    outputs = op.If(
        condition,
        then_branch=_arm(op, then, results, "then"),
        else_branch=_arm(op, otherwise, results, "else"),
        _outputs=len(results),
    )
    outputs = _listed(outputs)
    return [like.apply(value) for like, value in zip(results, outputs, strict=True)]


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
        return [go_on, *new_state]

    scalar = [i64(), Like(dtype=ir.DataType.BOOL, axes=())]
    inputs = [one.fresh(f"loop_in_{i}") for i, one in enumerate([*scalar, *like])]
    outputs = [one.fresh("") for one in [scalar[1], *like]]
    graph = op.builder.subgraph(body, inputs, outputs, name="loop")
    values = op.Loop(at_most, condition, *state, body=graph, _outputs=len(state))
    return [one.apply(value) for one, value in zip(like, _listed(values), strict=True)]


def _listed(values: ir.Value | Values) -> Values:
    return [values] if isinstance(values, ir.Value) else values


def _arm(op: Op, build: Callable[[Op], Values], results: Sequence[Like], name: str) -> ir.Graph:
    outputs = [like.fresh("") for like in results]

    def copied(inner: Op) -> Values:
        # An arm must produce its results itself, even one that is an outer value as it stands.
        here = inner.builder.graph
        return [v if v.graph is here else inner.Identity(v) for v in build(inner)]

    arm: ir.Graph = op.builder.subgraph(copied, [], outputs, name=name)
    return arm
