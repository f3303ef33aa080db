"""The precisions of TensorRT engines: the type of activations and caches, and of linear weights.

Weight-only ones have scales from the largest magnitude. A recipe that reads text rounds the inputs
of linear layers, too (W8A8); what it leaves, the head, keeps weights of as many bits alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from engines.qdq import Qdq
from engines.tensorrt.strong_types import NARROW
from engines.tensorrt.weight_only import WeightFormat
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
    def for_drafts(self) -> str:
        """What a draft takes whose precision nobody names."""
        return self.name if self.recipe is None else self.recipe.for_drafts + _suffix(self)

    def qdq(self) -> Qdq | None:
        return None if self.recipe is None else self.recipe.qdq(self.dtype.numpy())

    def rounded(self, weight: np.ndarray, name: str = "") -> np.ndarray:
        """A linear layer's weight [out, in] as the engine multiplies by it, in f32 arithmetic."""
        if (eight := self.qdq()) is not None and (scale := eight.scale_of(name)) is not None:
            return eight.rounded_weight(weight, scale)
        fmt = self.weights
        return weight if fmt is None or not fmt.fits(weight.shape[1]) else fmt.rounded(weight)


_SUFFIXES = {"fp16": "", "bf16": "-bf16"}
_WEIGHTS = {"int8": ("int8", None), "int4": ("int4", 64), "int4-128": ("int4", 128),
            "fp8-weight": ("fp8", None), "fp4": ("fp4", 16)}  # fmt: skip
_RECIPES = {"int8-smoothquant": ("int8", None), "fp8": ("fp8", None)}  # and what the head has


def _suffix(precision: EnginePrecision) -> str:
    return _SUFFIXES[precision.activations]


def _all() -> dict[str, EnginePrecision]:
    found = {name: EnginePrecision(name=name, activations=name) for name in NARROW}
    for name, (kind, block) in (_WEIGHTS | _RECIPES).items():
        for activations, suffix in _SUFFIXES.items():
            fmt = WeightFormat(kind=kind, block=block, scales=NARROW[activations].numpy())
            recipe = PRECISIONS[name] if name in _RECIPES else None
            full = name + suffix
            found[full] = EnginePrecision(
                name=full, activations=activations, weights=fmt, recipe=recipe
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
