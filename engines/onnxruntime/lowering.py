"""The passes from the portable graph to ONNX Runtime's, in order."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..apply import apply_passes
from ..qdq import Qdq, QdqLinearPass
from ..weight_expressions import FoldWeightExpressionsPass
from .activations import ActivationsPass
from .attention import GroupQueryAttentionPass
from .conv1d import GemmToLinearPass
from .full_precision import FoldTransposePass
from .normalization import NormalizationPass
from .projections import PackedProjectionsPass
from .quantized import QuantizedLinearPass, Quantizer
from .quantized_caches import CacheSteps, QuantizedCachesPass
from .rows_alike import RowsAlikePass
from .skip_layers import SkipAnyLayerPass, SkipLayersPass


def passes(quantizer: Quantizer | None, qdq: Qdq | None = None) -> list[ir.passes.PassBase]:
    """All passes for one precision; None keeps weights f32. qdq goes before the quantizer."""
    last = FoldTransposePass() if quantizer is None else QuantizedLinearPass(quantizer)
    return [
        FoldWeightExpressionsPass(),
        GemmToLinearPass(),
        PackedProjectionsPass(),
        NormalizationPass(),
        GroupQueryAttentionPass(),
        ActivationsPass(),
        *([QdqLinearPass(qdq)] if qdq is not None else []),
        last,
    ]


def lower(model: ir.Model, quantizer: Quantizer | None, qdq: Qdq | None = None) -> ir.Model:
    """Lower the portable graph in place for ONNX Runtime.

    Raises BuildError naming the pass, whatever went wrong in it.
    """
    return apply_passes(model, passes(quantizer, qdq))


def quantize_caches(model: ir.Model, steps: CacheSteps) -> ir.Model:
    """Make the caches of a lowered target hold 8 bits; errors as in `lower`."""
    return apply_passes(model, [QuantizedCachesPass(steps)])


def make_rows_alike(model: ir.Model) -> ir.Model:
    """Make the rows of a lowered target independent of their number; errors as in `lower`."""
    return apply_passes(model, [RowsAlikePass()])


def make_skippable(model: ir.Model, layers: Sequence[int] | None) -> ir.Model:
    """Let a call leave out these layers, or each of all (None) by itself; errors as in `lower`."""
    return apply_passes(model, [SkipAnyLayerPass() if layers is None else SkipLayersPass(layers)])
