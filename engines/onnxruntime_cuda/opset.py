"""Operators as ONNX had them in opset 18, the last that the CUDA provider knows throughout.

A kernel that is registered "from version n on" serves an operator of version n alone, lest a later
one mean something else. ONNX defined most operators anew with every few opsets, for types that
nothing here uses, and the provider follows years later: of opset 24 it has no Loop, Pad or Shape.
"""

from __future__ import annotations

import onnx_ir as ir

from runtime.errors import BuildError

OPSET = 18
# Operators that came later, where they are still in a graph.
_LATER = {"Attention", "TensorScatter", "RMSNormalization", "RotaryEmbedding", "Swish"}


class StableOpsetPass(ir.passes.InPlacePass):
    """Requires that nothing of a later opset is left but Gelu, which has a contrib twin."""

    def requires(self, model: ir.Model) -> None:
        later = sorted({n.op_type for n in model.graph.all_nodes() if not n.domain} & _LATER)
        if later:
            raise BuildError(
                f"--backend onnxruntime-cuda: received a model that needs {', '.join(later)}. "
                "Expected attention over heads whose size is a multiple of 8, and norms and "
                "activations that have an operator of ONNX Runtime's; use --backend onnxruntime "
                "or tensorrt-rtx."
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        imports = model.graph.opset_imports
        if imports.get("") == OPSET:
            return ir.passes.PassResult(model, modified=False)
        for node in [n for n in model.graph.all_nodes() if n.op_type == "Gelu" and not n.domain]:
            approximate = node.attributes.pop("approximate", None)
            tanh = approximate is not None and approximate.as_string() == "tanh"
            node.op_type = "FastGelu" if tanh else "Gelu"
            node.domain = "com.microsoft"
            imports["com.microsoft"] = 1
        imports[""] = OPSET
        for node in model.graph.all_nodes():
            node.version = None
        return ir.passes.PassResult(model, modified=True)
