"""The precisions of TensorRT engines: the type of activations and caches, and of linear weights.

Weight-only, with scales from the largest magnitude. Calibrated activations (W8A8) come as
QuantizeLinear and DequantizeLinear from a recipe, and need nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from engines.tensorrt.strong_types import NARROW
from engines.tensorrt.weight_only import WeightFormat
from runtime.errors import BuildError


@dataclass(frozen=True, kw_only=True)
class EnginePrecision:
    """`activations`: fp16 or bf16, also of caches, norms and the embedding."""

    name: str
    activations: str
    weights: WeightFormat | None = None

    @property
    def dtype(self) -> ir.DataType:
        return NARROW[self.activations]

    @property
    def cache_dtype(self) -> str:
        """As the contract names it."""
        return {"fp16": "float16", "bf16": "bfloat16"}[self.activations]

    def rounded(self, weight: np.ndarray, name: str = "") -> np.ndarray:
        """A linear layer's weight [out, in] as the engine multiplies by it, in f32 arithmetic."""
        fmt = self.weights
        return weight if fmt is None or not fmt.fits(weight.shape[1]) else fmt.rounded(weight)


_WEIGHTS = {"int8": ("int8", None), "int4": ("int4", 64), "int4-128": ("int4", 128),
            "fp8": ("fp8", None), "fp4": ("fp4", 16)}  # fmt: skip


def _all() -> dict[str, EnginePrecision]:
    found = {name: EnginePrecision(name=name, activations=name) for name in NARROW}
    for name, (kind, block) in _WEIGHTS.items():
        for activations, suffix in (("fp16", ""), ("bf16", "-bf16")):
            fmt = WeightFormat(kind=kind, block=block, scales=NARROW[activations].numpy())
            full = name + suffix
            found[full] = EnginePrecision(name=full, activations=activations, weights=fmt)
    return found


ENGINE_PRECISIONS = _all()


def engine_precision(name: str, flag: str = "--precision") -> EnginePrecision:
    """Raises BuildError naming the flag and the choices."""
    if name not in ENGINE_PRECISIONS:
        raise BuildError(
            f"{flag}: received {name!r}. Expected one of {', '.join(ENGINE_PRECISIONS)}, which "
            "TensorRT engines have."
        )
    return ENGINE_PRECISIONS[name]
