"""The passes from the portable graph to ONNX Runtime's, in order."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import onnx_ir as ir

from runtime.errors import BuildError, OutriderError

from ..qdq import Qdq, QdqLinearPass
from ..weight_expressions import FoldWeightExpressionsPass
from .activations import ActivationsPass
from .attention import GroupQueryAttentionPass
from .conv1d import GemmToLinearPass
from .full_precision import FoldTransposePass
from .normalization import NormalizationPass
from .projections import PackedProjectionsPass
from .quantized import QuantizedLinearPass, Quantizer
from .rows_alike import RowsAlikePass
from .skip_layers import SkipAnyLayerPass, SkipLayersPass

logger = logging.getLogger(__name__)


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
    return _apply(model, passes(quantizer, qdq))


def make_rows_alike(model: ir.Model) -> ir.Model:
    """Make the rows of a lowered target independent of their number; errors as in `lower`."""
    return _apply(model, [RowsAlikePass()])


def make_skippable(model: ir.Model, layers: Sequence[int] | None) -> ir.Model:
    """Let a call leave out these layers, or each of all (None) by itself; errors as in `lower`."""
    return _apply(model, [SkipAnyLayerPass() if layers is None else SkipLayersPass(layers)])


def _apply(model: ir.Model, steps: list[ir.passes.PassBase]) -> ir.Model:
    for step in steps:
        name = type(step).__name__
        try:
            result = step(model)
        except OutriderError:
            raise
        except Exception as error:  # a pass may fail in any way on a graph that it didn't expect
            cause = error.__cause__ or error
            raise BuildError(
                f"lowering pass {name}: {cause}. Expected a portable graph that it can rewrite; "
                "please report the model with its config.json."
            ) from error
        logger.info("%s: %s", name, "changed" if result.modified else "no change")
    return model
