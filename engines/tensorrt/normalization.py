"""RMS and layer norms → the standard operators, computed in f32 whatever the graph's own type.

A square of an fp16 activation overflows beyond 255: spelled out, a norm can't be in fp16. The fused
operators say in `stash_type` that they compute in f32.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules.fusion._rms_normalization import RmsNormFusion

from ..matching import drop_dead
from ..norm_rules import LAYER_NORM, OneVectorScale


class _RmsNorm(OneVectorScale, RmsNormFusion):
    """The library's, where the scale is one vector."""


_RMS_NORM = pattern.RewriteRuleSet(
    [
        _RmsNorm.rule("RmsNormScaleFirst", mul_order=False),
        _RmsNorm.rule("RmsNormScaleLast", mul_order=True),
    ]
)


class StandardNormsPass(ir.passes.InPlacePass):
    """Ensures that a norm over the last axis is one operator of the standard."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fused = LAYER_NORM.apply_to_model(model) + _RMS_NORM.apply_to_model(model)
        if fused:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(fused))
