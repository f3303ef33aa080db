"""Activations that the traced graph spells out → one operator each.

SiLU is x * sigmoid(x): QuickGelu with alpha 1 (the contrib operator that fuses it). GPT-2's and
Phi's GELU is its tanh approximation, written as a polynomial.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ..matching import constant_of, drop_dead, is_constant, operands, producer, replace


class ActivationsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fused = [(node, _fused(node)) for node in list(model.graph)]
        changed = [(node, new) for node, new in fused if new is not None]
        for node, new in changed:
            model.graph.insert_before(node, new)
            replace(node.outputs[0], new.outputs[0])
            if new.domain:
                model.graph.opset_imports[new.domain] = 1
        if changed:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(changed))


def _fused(node: ir.Node) -> ir.Node | None:
    x = _silu_input(node)
    if x is not None:
        return ir.node("QuickGelu", [x], {"alpha": 1.0}, domain="com.microsoft")
    x = _gelu_input(node)
    return ir.node("Gelu", [x], {"approximate": "tanh"}) if x is not None else None


def _silu_input(node: ir.Node) -> ir.Value | None:
    if node.op_type == "Swish":
        return node.inputs[0]
    if node.op_type != "Mul":
        return None
    for x, gate in operands(node):
        sigmoid = producer(gate, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is x:
            return x
    return None


def _gelu_input(node: ir.Node) -> ir.Value | None:
    """x of 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    if node.op_type != "Mul":
        return None
    for halved, rest in operands(node):
        x = _other(halved, "Mul", 0.5)
        tanh = producer(_other(rest, "Add", 1.0), "Tanh")
        polynomial = _other(tanh.inputs[0], "Mul", math.sqrt(2 / math.pi)) if tanh else None
        if x is not None and _is_polynomial(polynomial, x):
            return x
    return None


def _is_polynomial(value: ir.Value | None, x: ir.Value) -> bool:
    add = producer(value, "Add")
    for first, second in operands(add) if add is not None else ():
        cube = producer(_other(second, "Mul", 0.044715), "Pow")
        if first is x and cube is not None and cube.inputs[0] is x:
            return is_constant(cube.inputs[1], 3)
    return False


def _other(value: ir.Value | None, op_type: str, number: float) -> ir.Value | None:
    """What `number` is added to or multiplied with to make `value`."""
    node = producer(value, op_type)
    for operand, scalar in operands(node) if node is not None else ():
        found = constant_of(scalar)
        if found is not None and found.size == 1 and np.isclose(found.item(), number, rtol=1e-6):
            return operand
    return None
