"""x * sigmoid(x) → QuickGelu with alpha 1 (the contrib operator that fuses SiLU)."""

from __future__ import annotations

import onnx_ir as ir

from ..matching import drop_dead, operands, producer, replace


class SiluPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = False
        for node in list(model.graph):
            x = _silu_input(node)
            if x is not None:
                fused = ir.node("QuickGelu", [x], {"alpha": 1.0}, domain="com.microsoft")
                model.graph.insert_before(node, fused)
                replace(node.outputs[0], fused.outputs[0])
                changed = True
        if changed:
            drop_dead(model)
            model.graph.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=changed)


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
