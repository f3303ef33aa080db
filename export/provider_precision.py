"""The precisions of graphs for ONNX Runtime's CUDA provider: fp16, or fewer bits for weights alone.

Activations, caches and norms are fp16, logits f32. Weights are those of the CPU backend: symmetric
blocks of 32, which the provider's MatMulNBits and GatherBlockQuantized take as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from engines.onnxruntime.quantized import Quantizer
from runtime.errors import BuildError

from .precision import Precision, precision


@dataclass(frozen=True, kw_only=True)
class ProviderPrecision:
    name: str
    weights: Precision  # fp32: none is quantized, and all become fp16

    cache_dtype = "float16"
    missing_on_cpu: ClassVar[str | None] = None

    def quantizer(self) -> Quantizer | None:
        return self.weights.quantizer()

    def rounded(self, weight: np.ndarray, name: str = "") -> np.ndarray:
        return self.weights.rounded(weight, name)


_WEIGHTS = {"fp16": "fp32", "int8": "int8", "int4": "int4"}


def provider_precision(name: str, flag: str = "--precision") -> ProviderPrecision:
    """Raises BuildError naming the flag and the choices."""
    if name not in _WEIGHTS:
        raise BuildError(
            f"{flag}: received {name!r}. Expected one of {', '.join(_WEIGHTS)}, which --backend "
            "onnxruntime-cuda has."
        )
    return ProviderPrecision(name=name, weights=precision(_WEIGHTS[name]))
