"""Weights that calibration has made into codes, one file each: a build never holds them all.

A file stands under its name only when it is whole: what an interrupted calibration has solved is
not solved again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import write_arrays
from .block_quantization import BlockFormat, QuantizedWeight, as_stored, dequantize, signed_codes
from .factors import Factors
from .sites import TURNED

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class SolvedWeights:
    """Codes by the name that a weight has in the graph; joined ones are `a+b`.

    factors: what was moved between layers before rounding; None where nothing is.
    """

    directory: Path
    format: BlockFormat
    rows_of: Callable[[str], int]  # of a weight of the checkpoint, for those that are joined
    names: set[str] = field(default_factory=set)  # those in the directory
    factors: Factors | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def recall(self, names: Iterable[str]) -> None:
        """Take over those of `names` that an earlier run has solved."""
        self.names.update(name for name in names if self._path(name).exists())

    def put(
        self,
        name: str,
        quantized: QuantizedWeight,
        *,
        error: float,
        nearest: float,
        features: Array | None = None,
    ) -> None:
        """error, nearest: of the layer's output with these codes, and with the nearest ones.

        features: [in], what the weights were multiplied by before.
        """
        arrays = {
            "codes": quantized.codes,
            "scales": quantized.scales,
            "errors": np.array([error, nearest]),
            "features": np.zeros(0, np.float32) if features is None else features,
        }
        write_arrays(self._path(name), arrays)
        self.names.add(name)

    def errors(self, name: str) -> tuple[float, float]:
        """As they were `put`."""
        with np.load(self._path(name)) as arrays:
            error, nearest = arrays["errors"].tolist()
        return error, nearest

    def features(self, name: str) -> Array:
        """As they were `put`."""
        with np.load(self._path(name)) as arrays:
            found: Array = arrays["features"]
        return found

    def load(self, name: str) -> QuantizedWeight:
        """A row's factor is its scales': the codes are the same."""
        with np.load(self._path(name)) as arrays:
            codes, scales = arrays["codes"], arrays["scales"]
        if self.factors is not None and name in self.factors.rows:
            scales = as_stored(scales / self.factors.rows[name][:, None], self.format)
        return QuantizedWeight(codes=codes, scales=scales, zero_points=None)

    def joined(self, part: str) -> str | None:
        """The name under which the graph holds `part`: itself or joined, perhaps turned."""
        known = {part, part + TURNED}
        return next((name for name in self.names if known & set(name.split("+"))), None)

    def part(self, name: str, sizes: tuple[int, ...]) -> Array:
        """One checkpoint's weight [out, in] = `sizes`, f32, as the engine multiplies by it."""
        joined, rows = self._place(name, sizes[0])
        values = dequantize(self.load(joined), self.format, sizes[1])[rows]
        return self.unmoved(name, values)

    def codes(self, name: str, sizes: tuple[int, ...]) -> tuple[Array, Array]:
        """The same in numbers about 0: [out, in] i8, and scales [out, blocks] f32."""
        joined, rows = self._place(name, sizes[0])
        quantized = self.load(joined)
        return signed_codes(quantized, self.format)[rows, : sizes[1]], quantized.scales[rows]

    def moved(self, name: str, values: Array) -> Array:
        """A tensor of the checkpoint with the factors that were moved to it or from it."""
        if self.factors is not None and name in self.factors.vectors:
            divided: Array = values / self.factors.vectors[name]
            return divided
        joined = self.joined(name)
        if joined is not None and name not in joined.split("+"):  # the graph turns it
            return self.moved_rows(name, values.T).T
        return self.moved_rows(name, values)

    def unmoved(self, name: str, weight: Array) -> Array:
        """A weight [out, in] with them undone."""
        factor = self._factor(name, len(weight))
        return weight if factor is None else weight / factor

    def moved_rows(self, name: str, weight: Array) -> Array:
        """`moved` of a weight that is [out, in] already."""
        factor = self._factor(name, len(weight))
        return weight if factor is None else weight * factor

    def _factor(self, name: str, count: int) -> Array | None:
        """Of each element of a weight [count, in]; None where nothing was moved."""
        joined = self.joined(name)
        if self.factors is None or joined is None:
            return None
        joined, rows = self._place(name, count)
        features = self.factors.features.get(joined, np.ones(1, np.float32))
        divisors = self.factors.rows.get(joined, np.ones(rows.stop, np.float32))[rows]
        factor: Array = features / divisors[:, None]
        return factor

    def _place(self, name: str, count: int) -> tuple[str, slice]:
        """Where a checkpoint's weight stands among those that the graph joins."""
        joined = self.joined(name)
        assert joined is not None  # the caller asked
        others = joined.split("+")
        index = others.index(name if name in others else name + TURNED)
        first = sum(self.rows_of(other) for other in others[:index])
        return joined, slice(first, first + count)

    def _path(self, name: str) -> Path:
        return self.directory / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.npz"
