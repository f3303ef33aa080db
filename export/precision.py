"""The precisions that a build offers: what each does to the weights of linear layers.

Activations between layers, norms, caches and everything in the accept graph stay f32.

int4 is symmetric in blocks of 32, to the nearest. Measured on SmolLM2-135M-Instruct (KL and top-1
agreement over 1,722 tokens of Spec-Bench prompts, rounded weights in f32 arithmetic; processor time
of a step, one thread of an EPYC with AVX2, 128 tokens of context), against asymmetric blocks of 32:

    everywhere                   KL     top-1   a step of 1, 2, 5 rows
    asymmetric, 32               0.524  0.62    1     1     1
    symmetric, 32                0.500  0.63    0.84  0.95  0.97
    symmetric, 64                0.644  0.57    0.86  0.86  0.94
    symmetric, 32; 8 bits for    0.437  0.67    0.95  1.03  1.05
      embedding and head

Without zero points it is faster and no further from the checkpoint. Scales searched for the least
squared error took the last row from 0.437 to between 0.42 and 0.52, and mostly up: clipping the
few large weights costs more than the rest gains.

int4-gptq chooses codes for the layer's output on text (calibration.gptq) and keeps embedding and
head in 8 bits; with blocks of 64 and scales in half precision that takes 0.645 bytes a parameter.
Against fp32 on text that it hasn't read (7,480 tokens, `calibration compare`, reports/fidelity): KL
0.156, where rounding to nearest in blocks of 64 everywhere gives 0.513. Of its parts, in f32
arithmetic on 240 tokens of texts that it had read:
nearest codes in blocks of 64 0.668; 8 bits for embedding and head 0.450; codes chosen on prompts
alone 0.182, on as much text of its own besides 0.118; that in blocks of 32 0.102.

int4-awq has the same format. Summed over its layers, the output's error on the texts that were read
is 0.60 of what nearest codes make (GPTQ's: 0.26, by making more of these texts). On text that
neither has read its KL is 0.179.

int8-smoothquant moved the logits by 0.38 of themselves with the inputs of all 120 layers in 8 bits,
by 0.31 with the nine left out that reach beyond `most_reach`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from calibration.block_quantization import BlockFormat, QuantizedWeight, dequantize, quantize
from calibration.cache_steps import CacheSteps
from calibration.input_scales import InputScales, RangeRule
from calibration.solve import Solver
from calibration.solved import SolvedWeights
from engines.onnxruntime.quantized import Quantizer
from engines.qdq import FLOAT, EightBits, Qdq
from runtime.errors import BuildError


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`format` None keeps weights f32.

    outer: of embedding and head, where theirs is another; rows_alike: whether a target's row is to
    have the same bits alone and among others, which needs an engine that multiplies a lone row as
    it multiplies several: ONNX Runtime's 8 bits are so. eight_bits: weights and inputs of linear
    layers are both rounded, but for the head's. int8_caches: of the target, too. on_cpu: ONNX
    Runtime multiplies so; else engines alone do. for_drafts: what a draft takes whose precision
    nobody names; recipes that read text are for targets.
    """

    name: str
    format: BlockFormat | None
    outer: BlockFormat | None = None
    rows_alike: bool = False
    eight_bits: EightBits | None = None
    smooth: bool = False  # of eight_bits: SmoothQuant
    rule: RangeRule = RangeRule.ABSMAX  # of eight_bits: where inputs are cut off
    most_reach: float = math.inf  # of eight_bits: beyond it a layer's weight alone is rounded
    solver: Solver | None = None  # of codes that are made from text
    int8_caches: bool = False
    on_cpu: bool = True
    for_drafts: str = ""
    # Filled by export.calibrated; a weight that they don't have is rounded to nearest.
    solved: SolvedWeights | None = None
    inputs: InputScales | None = None
    caches: CacheSteps | None = None

    def format_of(self, name: str) -> BlockFormat:
        """Of a weight by its name in a graph; joined ones are `a+b`."""
        assert self.format is not None  # f32 has no quantizer
        if self.outer is None or (self.solved is not None and name in self.solved):
            return self.format
        return self.outer

    @property
    def calibrated(self) -> bool:
        """Whether it reads text."""
        return self.solver is not None or self.eight_bits is not None or self.int8_caches

    def moved(self, name: str, values: np.ndarray) -> np.ndarray:
        """A tensor of the checkpoint as it is before anything is rounded."""
        return values if self.solved is None else self.solved.moved(name, values)

    def quantizer(self) -> Quantizer | None:
        if self.format is None:
            return None
        return Quantizer(format_of=self.format_of, quantize=self._quantized)

    def qdq(self, scales: np.dtype = FLOAT) -> Qdq | None:
        """scales: the type that the graph will have."""
        if self.eight_bits is None or self.inputs is None:
            return None
        return Qdq(kind=self.eight_bits, scale_of=self.inputs.of, scales=scales)

    def rounded(self, weight: np.ndarray, name: str = "") -> np.ndarray:
        """`weight` [out, in], called `name` in the checkpoint, as the engine sees it."""
        if self.format is None:
            return weight
        if self.solved is not None and self.solved.joined(name) is not None:
            return self.solved.part(name, weight.shape)
        if (eight := self.qdq()) is not None and (scale := eight.scale_of(name)) is not None:
            return eight.rounded_weight(weight, scale)
        fmt = self.format_of(name)
        return dequantize(quantize(weight, fmt), fmt, weight.shape[1])

    def _quantized(self, weight: np.ndarray, name: str) -> QuantizedWeight:
        if self.solved is not None and name in self.solved:
            return self.solved.load(name)
        return quantize(weight, self.format_of(name))


_INT8 = BlockFormat(bits=8, block=32, symmetric=True)
_INT4 = BlockFormat(bits=4, block=32, symmetric=True)
_INT4_64 = BlockFormat(bits=4, block=64, symmetric=True, half_scales=True)
_INT8_64 = BlockFormat(bits=8, block=64, symmetric=True, half_scales=True)

PRECISIONS = {
    p.name: p
    for p in (
        Precision(name="fp32", format=None),
        Precision(name="int8", format=_INT8, rows_alike=True),
        Precision(name="int4", format=_INT4),
        Precision(
            name="int4-gptq",
            format=_INT4_64,
            outer=_INT8_64,
            solver=Solver.GPTQ,
            for_drafts="int4",
        ),
        Precision(
            name="int4-awq",
            format=_INT4_64,
            outer=_INT8_64,
            solver=Solver.AWQ,
            for_drafts="int4",
        ),
        Precision(
            name="int8-smoothquant",
            format=_INT8,
            eight_bits=EightBits.INT8,
            smooth=True,
            rule=RangeRule.MSE,
            most_reach=6.0,
            for_drafts="int8",
        ),
        Precision(
            name="int8-kv",
            format=_INT8,
            int8_caches=True,
            for_drafts="int8",
        ),
        Precision(
            name="fp8",
            format=None,
            eight_bits=EightBits.FP8,
            on_cpu=False,
            for_drafts="fp8-weight",
        ),
    )
}


def precision(name: str, flag: str = "--precision") -> Precision:
    """One for ONNX Runtime. Raises BuildError naming the flag and the choices."""
    if name not in on_cpu():
        raise BuildError(f"{flag}: received {name!r}. Expected one of {', '.join(on_cpu())}.")
    return PRECISIONS[name]


def on_cpu() -> list[str]:
    return [p.name for p in PRECISIONS.values() if p.on_cpu]


def draft_precision(name: str) -> Precision:
    """The same for a draft, which isn't calibrated."""
    chosen = precision(name, "--draft-precision")
    if chosen.calibrated:
        plain = [name for name in on_cpu() if not PRECISIONS[name].calibrated]
        raise BuildError(
            f"--draft-precision: received {name!r}, which calibrates a target. Expected one of "
            f"{', '.join(plain)}."
        )
    return chosen
