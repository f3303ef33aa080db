"""The passes from the portable graph to TensorRT's, in order."""

from __future__ import annotations

import onnx_ir as ir

from ..apply import apply_passes
from ..onnxruntime.conv1d import GemmToLinearPass
from ..onnxruntime.full_precision import FoldTransposePass
from ..weight_expressions import FoldWeightExpressionsPass
from .attention import SoftCapPass
from .normalization import StandardNormsPass
from .rotary import RotaryEmbeddingPass
from .shape_inputs import ContextBucketPass, LogitSlotsPass
from .strong_types import StrongTypesPass
from .weight_only import WeightFormat, WeightOnlyPass


def exact_passes(
    weights: WeightFormat | None = None, recipe: ir.passes.PassBase | None = None
) -> list[ir.passes.PassBase]:
    """All but the types: what they make can be held against the model in f32.

    recipe quantizes some layers; weights is of those that it leaves.
    """
    quantized = [] if recipe is None else [recipe]
    quantized += [] if weights is None else [WeightOnlyPass(weights)]
    return [
        FoldWeightExpressionsPass(),
        GemmToLinearPass(),
        StandardNormsPass(),
        RotaryEmbeddingPass(),
        LogitSlotsPass(),
        ContextBucketPass(),
        SoftCapPass(),
        *quantized,
        FoldTransposePass(),
    ]


def lower_exactly(
    model: ir.Model,
    weights: WeightFormat | None = None,
    recipe: ir.passes.PassBase | None = None,
) -> ir.Model:
    """Lower the portable graph in place, all in f32. Raises BuildError naming the pass."""
    return apply_passes(model, exact_passes(weights, recipe))


def lower(
    model: ir.Model,
    dtype: ir.DataType,
    weights: WeightFormat | None = None,
    recipe: ir.passes.PassBase | None = None,
) -> ir.Model:
    """The same, strongly typed; `weights` None keeps them in `dtype`. Errors as above."""
    return apply_passes(model, [*exact_passes(weights, recipe), StrongTypesPass(dtype)])
