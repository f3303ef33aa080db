"""The precisions that a build offers: what each does to the weights of linear layers.

Activations between layers, norms, caches and everything in the accept graph stay f32.

int4 is symmetric in blocks of 32. Measured on SmolLM2-135M-Instruct (KL and top-1 agreement over
1,722 tokens of Spec-Bench prompts, rounded weights in f32 arithmetic; processor time of a step, one
thread of an EPYC with AVX2, 128 tokens of context), against asymmetric blocks of 32 everywhere:

    everywhere                   KL     top-1   a step of 1, 2, 5 rows
    asymmetric, 32               0.524  0.62    1     1     1
    symmetric, 32                0.500  0.63    0.84  0.95  0.97
    symmetric, 64                0.644  0.57    0.86  0.86  0.94
    symmetric, 32; 8 bits for    0.437  0.67    0.95  1.03  1.05
      embedding and head

Without zero points it is faster and no further from the checkpoint. Scales searched for the least
squared error took the last row from 0.437 to between 0.42 and 0.52, and mostly up: clipping the
few large weights costs more than the rest gains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.block_quantization import BlockFormat, QuantizedWeight, dequantize, quantize
from engines.onnxruntime.quantized import Quantizer
from runtime.errors import BuildError


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`format` None keeps weights f32.

    rows_alike: whether a target's row is to have the same bits alone and among others, which needs
    an engine that multiplies a lone row as it multiplies several: ONNX Runtime's 8 bits are so.
    """

    name: str
    format: BlockFormat | None
    rows_alike: bool = False

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
        Precision(
            name="int8", format=BlockFormat(bits=8, block=32, symmetric=True), rows_alike=True
        ),
        Precision(name="int4", format=BlockFormat(bits=4, block=32, symmetric=True)),
    )
}


def precision(name: str, flag: str = "--precision") -> Precision:
    """Raises BuildError naming the flag and the choices."""
    if name not in PRECISIONS:
        raise BuildError(f"{flag}: received {name!r}. Expected one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]
