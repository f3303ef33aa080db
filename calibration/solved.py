"""Weights that calibration has made into codes, one file each: a build never holds them all.

A file stands under its name only when it is whole: what an interrupted calibration has solved is
not solved again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .block_quantization import BlockFormat, QuantizedWeight, dequantize

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class SolvedWeights:
    """Codes by the name that a weight has in the graph; joined ones are `a+b`."""

    directory: Path
    format: BlockFormat
    rows_of: Callable[[str], int]  # of a weight of the checkpoint, for those that are joined
    names: set[str] = field(default_factory=set)  # those in the directory

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def recall(self, names: Iterable[str]) -> None:
        """Take over those of `names` that an earlier run has solved."""
        self.names.update(name for name in names if self._path(name).exists())

    def put(self, name: str, quantized: QuantizedWeight, *, error: float, nearest: float) -> None:
        """error, nearest: of the layer's output with these codes, and with the nearest ones."""
        arrays = {
            "codes": quantized.codes,
            "scales": quantized.scales,
            "errors": np.array([error, nearest]),
        }
        write_arrays(self._path(name), arrays)
        self.names.add(name)

    def errors(self, name: str) -> tuple[float, float]:
        """As they were `put`."""
        with np.load(self._path(name)) as arrays:
            error, nearest = arrays["errors"].tolist()
        return error, nearest

    def load(self, name: str) -> QuantizedWeight:
        with np.load(self._path(name)) as arrays:
            return QuantizedWeight(codes=arrays["codes"], scales=arrays["scales"], zero_points=None)

    def joined(self, part: str) -> str | None:
        """The name under which the graph holds `part`, by itself or among others."""
        return next((name for name in self.names if part in name.split("+")), None)

    def part(self, name: str, sizes: tuple[int, ...]) -> Array:
        """One checkpoint's weight [out, in] = `sizes`, f32, as the engine multiplies by it."""
        joined = self.joined(name)
        assert joined is not None  # the caller asked
        first = 0
        for other in joined.split("+"):
            if other == name:
                break
            first += self.rows_of(other)
        values = dequantize(self.load(joined), self.format, sizes[1])
        return values[first : first + sizes[0]]

    def _path(self, name: str) -> Path:
        return self.directory / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.npz"


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """One file, whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    partial.replace(path)
