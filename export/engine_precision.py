"""The precisions of TensorRT engines: the type of activations and caches, and of linear weights.

Weight-only ones have scales from the largest magnitude. Recipes that read text round the inputs of
linear layers, too (W8A8), or choose codes of 4 bits; what they leave, such as the head, has weights
of 8 bits alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from calibration.block_quantization import BlockFormat
from calibration.solved import SolvedWeights
from engines.qdq import Qdq, QdqLinearPass
from engines.tensorrt.strong_types import NARROW
from engines.tensorrt.weight_only import WeightFormat, WeightOnlyPass
from runtime.errors import BuildError
from runtime.manifest import ENGINE_LIBRARIES

from .precision import PRECISIONS, Precision, on_cpu


@dataclass(frozen=True, kw_only=True)
class EnginePrecision:
    """`activations`: fp16 or bf16, also of caches, norms and the embedding.

    recipe: what reads text; filled by export.calibrated before a graph is lowered.
    """

    name: str
    activations: str
    weights: WeightFormat | None = None
    recipe: Precision | None = None

    @property
    def dtype(self) -> ir.DataType:
        return NARROW[self.activations]

    @property
    def cache_dtype(self) -> str:
        """As the contract names it."""
        return {"fp16": "float16", "bf16": "bfloat16"}[self.activations]

    @property
    def missing_on_cpu(self) -> str | None:
        """What ONNX Runtime's CPU has no kernels for, in the strongly typed graph."""
        if self.activations != "fp16":
            return self.activations
        return "fp4" if self.weights is not None and self.weights.kind == "fp4" else None

    @property
    def for_drafts(self) -> str:
        """What a draft takes whose precision nobody names."""
        return self.name if self.recipe is None else self.recipe.for_drafts + _suffix(self)

    def recipe_pass(self) -> ir.passes.PassBase | None:
        """What quantizes the layers that the recipe found something for."""
        if (eight := self._qdq()) is not None:
            return QdqLinearPass(eight)
        if self._solved is not None:
            return WeightOnlyPass(_codes(self._solved.format, self.dtype), self._solved)
        return None

    def moved(self, name: str, values: np.ndarray) -> np.ndarray:
        """A tensor of the checkpoint as it is before anything is rounded."""
        return values if self.recipe is None else self.recipe.moved(name, values)

    def rounded(self, weight: np.ndarray, name: str = "") -> np.ndarray:
        """A linear layer's weight [out, in] as the engine multiplies by it, in f32 arithmetic."""
        if (eight := self._qdq()) is not None and (scale := eight.scale_of(name)) is not None:
            return eight.rounded_weight(weight, scale)
        solved, fmt = self._solved, self.weights
        if solved is None or solved.joined(name) is None:
            return weight if fmt is None or not fmt.fits(weight.shape[1]) else fmt.rounded(weight)
        if _codes(solved.format, self.dtype).fits(weight.shape[1]):
            return solved.part(name, weight.shape)
        assert fmt is not None  # of such a recipe
        return solved.unmoved(name, fmt.rounded(solved.moved_rows(name, weight)))

    @property
    def _solved(self) -> SolvedWeights | None:
        return None if self.recipe is None else self.recipe.solved

    def _qdq(self) -> Qdq | None:
        return None if self.recipe is None else self.recipe.qdq(self.dtype.numpy())


def _codes(fmt: BlockFormat, dtype: ir.DataType) -> WeightFormat:
    """As the engine reads what calibration solved."""
    return WeightFormat(kind="int4", block=fmt.block, scales=dtype.numpy())


_SUFFIXES = {"fp16": "", "bf16": "-bf16"}
_WEIGHTS = {"int8": ("int8", None), "int4": ("int4", 64), "int4-128": ("int4", 128),
            "fp8-weight": ("fp8", None), "fp4": ("fp4", 16)}  # fmt: skip
# Recipes that read text, and what the layers that they leave have.
_RECIPES = {"int8-smoothquant": ("int8", None), "fp8": ("fp8", None)}
_HALF_RECIPES = {"int4-gptq": ("int8", None), "int4-awq": ("int8", None)}  # their scales are f16


def _recipe(name: str) -> Precision | None:
    """As engines carry it: codes reach as far down as up, under scales above 0."""
    if name not in _RECIPES | _HALF_RECIPES:
        return None
    found = PRECISIONS[name]
    if found.solver is None:
        return found
    assert found.format is not None  # of what is solved
    return replace(found, format=replace(found.format, even=True))


def _suffix(precision: EnginePrecision) -> str:
    return _SUFFIXES[precision.activations]


def _all() -> dict[str, EnginePrecision]:
    found = {name: EnginePrecision(name=name, activations=name) for name in NARROW}
    for name, (kind, block) in (_WEIGHTS | _RECIPES | _HALF_RECIPES).items():
        for activations, suffix in _SUFFIXES.items():
            if suffix and name in _HALF_RECIPES:
                continue
            fmt = WeightFormat(kind=kind, block=block, scales=NARROW[activations].numpy())
            full = name + suffix
            found[full] = EnginePrecision(
                name=full, activations=activations, weights=fmt, recipe=_recipe(name)
            )
    return found


ENGINE_PRECISIONS = _all()


def engine_precision(name: str, flag: str = "--precision") -> EnginePrecision:
    """Raises BuildError naming the flag and the choices."""
    if name not in ENGINE_PRECISIONS:
        elsewhere = f", or --backend onnxruntime for {name}" if name in on_cpu() else ""
        raise BuildError(
            f"{flag}: received {name!r}. Expected one of {', '.join(ENGINE_PRECISIONS)}, which "
            f"TensorRT engines have{elsewhere}."
        )
    return ENGINE_PRECISIONS[name]


def engine_draft_precision(name: str) -> EnginePrecision:
    """The same for a draft, which isn't calibrated."""
    chosen = engine_precision(name, "--draft-precision")
    if chosen.recipe is not None:
        plain = [p.name for p in ENGINE_PRECISIONS.values() if p.recipe is None]
        raise BuildError(
            f"--draft-precision: received {name!r}, which calibrates a target. Expected one of "
            f"{', '.join(plain)}."
        )
    return chosen


def refuse_without_engines(name: str | None, flag: str, backend: str) -> None:
    """Raises BuildError for what engines alone carry, asked of a backend that has none."""
    if name in ENGINE_PRECISIONS and name not in on_cpu():
        raise BuildError(
            f"{flag}: received {name!r} with --backend {backend}, which doesn't multiply in such "
            f"numbers. Expected one of {', '.join(on_cpu())}, or --backend "
            f"{' or '.join(ENGINE_LIBRARIES)}, which carry {name}."
        )
