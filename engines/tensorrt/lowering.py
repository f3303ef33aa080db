"""The passes from the portable graph to TensorRT's, in order."""

from __future__ import annotations

import logging

import onnx_ir as ir

from runtime.errors import BuildError, OutriderError

from ..onnxruntime.conv1d import GemmToLinearPass
from ..onnxruntime.full_precision import FoldTransposePass
from ..weight_expressions import FoldWeightExpressionsPass
from .attention import SoftCapPass
from .normalization import StandardNormsPass
from .rotary import RotaryEmbeddingPass
from .shape_inputs import ContextBucketPass, LogitSlotsPass
from .strong_types import StrongTypesPass

logger = logging.getLogger(__name__)


def passes(dtype: ir.DataType) -> list[ir.passes.PassBase]:
    return [
        FoldWeightExpressionsPass(),
        GemmToLinearPass(),
        StandardNormsPass(),
        RotaryEmbeddingPass(),
        LogitSlotsPass(),
        ContextBucketPass(),
        SoftCapPass(),
        FoldTransposePass(),
        StrongTypesPass(dtype),
    ]


def lower(model: ir.Model, dtype: ir.DataType) -> ir.Model:
    """Lower the portable graph in place. Raises BuildError naming the pass."""
    for step in passes(dtype):
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
