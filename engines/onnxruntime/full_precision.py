"""Weights that stay f32: transposed once, when written, instead of in every run."""

from __future__ import annotations

import onnx_ir as ir

from ..matching import attribute, drop_dead
from ..weights import is_weight, shape, transposed


class FoldTransposePass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [n for n in model.graph if n.op_type == "Transpose" and is_weight(n.inputs[0])]
        found = [n for n in found if len(shape(n.inputs[0])) == 2]  # type: ignore[arg-type]
        found = [n for n in found if list(attribute(n, "perm")) == [1, 0]]  # type: ignore[call-overload]
        for node in found:
            assert node.inputs[0] is not None
            weight = transposed(model.graph, node.inputs[0])
            node.outputs[0].replace_all_uses_with(weight)
        if found:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(found))
