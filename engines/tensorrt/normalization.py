"""RMS and layer norms → the standard operators, computed in f32 whatever the graph's own type.

A square of an fp16 activation overflows beyond 255: spelled out, a norm can't be in fp16. The fused
operators say in `stash_type` that they compute in f32.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules.fusion._layer_norm import LayerNormFusion
from onnxscript.rewriter.rules.fusion._rms_normalization import RmsNormFusion

from ..matching import drop_dead, last_dim


class _RmsNorm(RmsNormFusion):
    def check(self, op, x, scale, epsilon, compute_dtype=None, target_dtype=None, **_):  # type: ignore[no-untyped-def]
        if not _is_vector_over(scale, x):
            return pattern.MatchResult().fail("the scale isn't one vector", scale)
        return super().check(op, x, scale, epsilon, compute_dtype, target_dtype)


class _LayerNorm(LayerNormFusion):
    def check(self, context, x, scale, epsilon, **_):  # type: ignore[no-untyped-def]
        if not _is_vector_over(scale, x):
            return pattern.MatchResult().fail("the scale isn't one vector", scale)
        return super().check(context, x, epsilon)


# In this order: behind its mean, a layer norm without bias is an RMS norm.
_LAYER_NORM = pattern.RewriteRuleSet([_LayerNorm.rule("LayerNormWithoutBias")], commute=True)
_RMS_NORM = pattern.RewriteRuleSet(
    [
        _RmsNorm.rule("RmsNormScaleFirst", mul_order=False),
        _RmsNorm.rule("RmsNormScaleLast", mul_order=True),
    ]
)


class StandardNormsPass(ir.passes.InPlacePass):
    """Ensures that a norm over the last axis is one operator of the standard."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fused = _LAYER_NORM.apply_to_model(model) + _RMS_NORM.apply_to_model(model)
        if fused:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(fused))


def _is_vector_over(scale: ir.Value, x: ir.Value) -> bool:
    size = last_dim(x)
    return size is not None and scale.shape is not None and list(scale.shape) == [size]
