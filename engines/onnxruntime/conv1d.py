"""GPT-2's linear layers, `Gemm` over flattened rows, in the form that the other passes know.

The checkpoint stores these weights as [in, out]. The transposed weight [out, in] is another weight
still to come, so that quantization and packing see one kind of linear layer.
"""

from __future__ import annotations

import onnx_ir as ir

from ..matching import attribute, drop_dead, producer, replace, sole_consumer
from ..weights import is_weight, transposed


class GemmToLinearPass(ir.passes.InPlacePass):
    """Ensures that no Gemm by a weight is left: each is MatMul by a transpose, and Add."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if _is_linear(node)]
        for node in found:
            _rewrite(model.graph, node)
        if found:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(found))

    def ensures(self, model: ir.Model) -> None:
        left = [node.name for node in model.graph if _is_linear(node)]
        if left:
            raise ir.passes.PostconditionError(f"Gemm by a weight left over: {left[:3]}")


def _is_linear(node: ir.Node) -> bool:
    if node.op_type != "Gemm" or not is_weight(node.inputs[1]):
        return False
    plain = attribute(node, "alpha", 1.0) == 1.0 and attribute(node, "beta", 1.0) == 1.0
    return plain and not attribute(node, "transA", 0)


def _rewrite(graph: ir.Graph, gemm: ir.Node) -> None:
    x, out = _unflattened(gemm)
    stored = gemm.inputs[1]
    assert stored is not None
    weight = stored if attribute(gemm, "transB", 0) else transposed(graph, stored)
    turned = ir.node("Transpose", [weight], {"perm": [1, 0]})
    product = ir.node("MatMul", [x, turned.outputs[0]])
    nodes = [turned, product]
    if len(gemm.inputs) > 2 and gemm.inputs[2] is not None:
        nodes.append(ir.node("Add", [product.outputs[0], gemm.inputs[2]]))
    for node in nodes[1:]:
        node.outputs[0].shape, node.outputs[0].type = out.shape, out.type
    graph.insert_before(gemm, nodes)
    replace(out, nodes[-1].outputs[0])


def _unflattened(gemm: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Input and output of the layer before and after its rows were flattened, if they were."""
    x, out = gemm.inputs[0], gemm.outputs[0]
    assert x is not None
    before, after = producer(x, "Reshape"), sole_consumer(out, "Reshape")
    if before is None or after is None or before.inputs[0] is None:
        return x, out
    wide, wide_out = before.inputs[0], after.outputs[0]
    if wide.shape is None or wide_out.shape is None or x.shape is None or out.shape is None:
        return x, out
    same_rows = list(wide.shape[:-1]) == list(wide_out.shape[:-1])
    same_width = wide.shape[-1] == x.shape[-1] and wide_out.shape[-1] == out.shape[-1]
    return (wide, wide_out) if same_rows and same_width else (x, out)
