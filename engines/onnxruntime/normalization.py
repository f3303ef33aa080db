"""RMS and layer norms → one operator each, together with a residual addition before them.

The rules are onnxscript's, under the checks that they leave out: the scale must be one vector over
the normalised axis, or the fused operator would refuse or misread it.
"""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnxscript.rewriter import pattern
from onnxscript.rewriter.ort_fusions.rms_normalization import RmsNormFusion
from onnxscript.rewriter.ort_fusions.skip_normalization import (
    fuse_skip_layer_normalization,
    fuse_skip_rms_normalization,
)

from ..matching import attribute, drop_dead, producer, replace, sole_consumer
from ..norm_rules import LAYER_NORM, OneVectorScale

logger = logging.getLogger(__name__)

_NORMS = ("LayerNormalization", "SimplifiedLayerNormalization")


class _RmsNorm(OneVectorScale, RmsNormFusion):
    """The library's, where the scale is one vector."""


_RMS_NORM = pattern.RewriteRuleSet(
    [
        _RmsNorm.rule("RmsNormScaleFirst", _mul_order=False),
        _RmsNorm.rule("RmsNormScaleLast", _mul_order=True),
    ]
)


class NormalizationPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fused = LAYER_NORM.apply_to_model(model) + _RMS_NORM.apply_to_model(model)
        skipped = fuse_skip_rms_normalization(model) + fuse_skip_layer_normalization(model)
        if skipped:
            model.graph.opset_imports["com.microsoft"] = 1
        moved = _norms_before_transposes(model)
        logger.info("norms: %d fused, %d with their residual", fused, skipped)
        return ir.passes.PassResult(model, modified=bool(fused + skipped + moved))


def _norms_before_transposes(model: ir.Model) -> int:
    """norm(transpose(x)) → transpose(norm(x)) where the last axis stays the last.

    A norm of queries or keys then reads the projection as it lies, and the transpose meets the
    attention, which undoes it.
    """
    moved = 0
    for norm in list(model.graph):
        turn = producer(norm.inputs[0], "Transpose") if norm.op_type in _NORMS else None
        if turn is None or sole_consumer(turn.outputs[0], *_NORMS) is None:
            continue
        perm = list(attribute(turn, "perm", ()))  # type: ignore[call-overload]
        if (
            not perm
            or perm[-1] != len(perm) - 1
            or attribute(norm, "axis", -1) not in (-1, perm[-1])
        ):
            continue
        _swap(model.graph, turn, norm, perm)
        moved += 1
    if moved:
        drop_dead(model)
    return moved


def _swap(graph: ir.Graph, turn: ir.Node, norm: ir.Node, perm: list[int]) -> None:
    x = turn.inputs[0]
    assert x is not None
    first = ir.node(norm.op_type, [x, *norm.inputs[1:]], dict(norm.attributes), domain=norm.domain)
    second = ir.node("Transpose", [first.outputs[0]], {"perm": perm})
    first.outputs[0].shape, first.outputs[0].type = x.shape, x.type
    graph.insert_before(norm, [first, second])
    replace(norm.outputs[0], second.outputs[0])
