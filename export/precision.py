"""The precisions that a build offers: what each does to the weights of linear layers.

Activations between layers, norms, caches and everything in the accept graph stay f32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.block_quantization import BlockFormat, QuantizedWeight, dequantize, quantize
from engines.onnxruntime.quantized import Quantizer
from runtime.errors import BuildError


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`format` None keeps weights f32."""

    name: str
    format: BlockFormat | None

    def quantizer(self) -> Quantizer | None:
        if self.format is None:
            return None
        fmt = self.format

        def make(weight: np.ndarray, _name: str) -> QuantizedWeight:
            return quantize(weight, fmt)

        return Quantizer(format=fmt, quantize=make)

    def rounded(self, weight: np.ndarray) -> np.ndarray:
        """`weight` [out, in] as the engine sees it."""
        if self.format is None:
            return weight
        return dequantize(quantize(weight, self.format), self.format, weight.shape[1])


PRECISIONS = {
    p.name: p
    for p in (
        Precision(name="fp32", format=None),
        Precision(name="int8", format=BlockFormat(bits=8, block=32, symmetric=True)),
        Precision(name="int4", format=BlockFormat(bits=4, block=32, symmetric=False)),
    )
}


def precision(name: str, flag: str = "--precision") -> Precision:
    """Raises BuildError naming the flag and the choices."""
    if name not in PRECISIONS:
        raise BuildError(f"{flag}: received {name!r}. Expected one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]
