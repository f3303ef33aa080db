"""What the library's rules for norms leave unchecked, and its rule for layer norms with that check.

The scale must be one vector over the normalised axis, or a fused operator would refuse or misread
it.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules.fusion._layer_norm import LayerNormFusion

from .matching import last_dim


class OneVectorScale:
    """In front of a rule for RMS norms: its check, behind this one."""

    def check(self, op, x, scale, epsilon, compute_dtype=None, target_dtype=None, **_):  # type: ignore[no-untyped-def]
        if not is_vector_over(scale, x):
            return pattern.MatchResult().fail("the scale isn't one vector", scale)
        return super().check(op, x, scale, epsilon, compute_dtype, target_dtype)  # type: ignore[misc]


class _LayerNorm(LayerNormFusion):
    def check(self, context, x, scale, epsilon, **_):  # type: ignore[no-untyped-def]
        if not is_vector_over(scale, x):
            return pattern.MatchResult().fail("the scale isn't one vector", scale)
        return super().check(context, x, epsilon)


#: To be applied first: behind its mean, a layer norm without bias is an RMS norm.
LAYER_NORM = pattern.RewriteRuleSet([_LayerNorm.rule("LayerNormWithoutBias")], commute=True)


def is_vector_over(scale: ir.Value, x: ir.Value) -> bool:
    size = last_dim(x)
    return size is not None and scale.shape is not None and list(scale.shape) == [size]
