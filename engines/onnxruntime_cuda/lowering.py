"""The passes from the portable graph to the CUDA provider's, in order.

They are the CPU's, whose operators have kernels on both (`kernels`); then sizes become inputs, and
types fp16: GroupQueryAttention has no f32 kernel on CUDA, its angles are fp16 there, too.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ..apply import apply_passes
from ..onnxruntime.lowering import passes
from ..onnxruntime.quantized import Quantizer
from ..tensorrt.strong_types import StrongTypesPass
from .opset import StableOpsetPass
from .row_inputs import RowInputsPass


def exact_passes(quantizer: Quantizer | None) -> list[ir.passes.PassBase]:
    """All but the types: what they make can be held against the model in f32."""
    if quantizer is not None:
        # The provider never rounds activations; on the CPU this says not to.
        quantizer = replace(quantizer, accuracy_level=0)
    return [*passes(quantizer), RowInputsPass(), StableOpsetPass()]


def lower_exactly(model: ir.Model, quantizer: Quantizer | None) -> ir.Model:
    """Lower the portable graph in place, all in f32. Raises BuildError naming the pass."""
    return apply_passes(model, exact_passes(quantizer))


def lower(model: ir.Model, quantizer: Quantizer | None) -> ir.Model:
    """The same in fp16: caches, activations, and weights that aren't quantized."""
    return apply_passes(model, [*exact_passes(quantizer), StrongTypesPass(ir.DataType.FLOAT16)])


def lower_sampling(model: ir.Model) -> ir.Model:
    """A graph without weights, such as accept: f32 as it is."""
    return apply_passes(model, [StableOpsetPass()])
