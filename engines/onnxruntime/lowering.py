"""The passes from the portable graph to ONNX Runtime's, in order."""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.skip_normalization import (
    fuse_skip_layer_normalization,
    fuse_skip_rms_normalization,
)

from .activations import SiluPass
from .attention import GroupQueryAttentionPass
from .full_precision import FoldTransposePass
from .projections import PackedProjectionsPass
from .quantized import QuantizedLinearPass, Quantizer

logger = logging.getLogger(__name__)


class NormalizationPass(ir.passes.InPlacePass):
    """RMS norms, with the residual addition before them, by the library's own rules."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fused = fuse_rms_normalization(model)
        skipped = fuse_skip_rms_normalization(model) + fuse_skip_layer_normalization(model)
        if skipped:
            model.graph.opset_imports["com.microsoft"] = 1
        logger.info("norms: %d fused, %d with their residual", fused, skipped)
        return ir.passes.PassResult(model, modified=bool(fused + skipped))


def passes(quantizer: Quantizer | None) -> list[ir.passes.PassBase]:
    """All passes for one precision; None keeps weights f32."""
    last = FoldTransposePass() if quantizer is None else QuantizedLinearPass(quantizer)
    return [
        PackedProjectionsPass(),
        GroupQueryAttentionPass(),
        NormalizationPass(),
        SiluPass(),
        last,
    ]


def lower(model: ir.Model, quantizer: Quantizer | None) -> ir.Model:
    """Lower the portable graph in place for ONNX Runtime; errors name the pass."""
    for step in passes(quantizer):
        result = step(model)
        logger.info("%s: %s", type(step).__name__, "changed" if result.modified else "no change")
    return model
