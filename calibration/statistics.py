"""What calibration keeps of the rows that a layer reads: sums and extremes, never the rows.

So memory is bounded by the model's widths, whatever the amount of text; and a state is a few
arrays, which can be written down and taken up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BINS = 2048


class Statistic(Protocol):
    """Grows by `add(rows [count, features] f32)`; `of_state` takes up what `state` gave."""

    @classmethod
    def empty(cls, features: int) -> Self: ...
    @classmethod
    def of_state(cls, state: Mapping[str, Array]) -> Self: ...
    @staticmethod
    def size_bytes(features: int) -> int: ...
    def add(self, rows: Array) -> None: ...
    def state(self) -> dict[str, Array]: ...


class Hessian:
    """XᵀX over all rows: how an error of two weights of one output adds up."""

    def __init__(self, matrix: Array, count: int) -> None:
        self.matrix = matrix  # [features, features] f32
        self.count = count

    @classmethod
    def empty(cls, features: int) -> Self:
        return cls(np.zeros((features, features), np.float32), 0)

    @classmethod
    def of_state(cls, state: Mapping[str, Array]) -> Self:
        return cls(state["matrix"], int(state["count"]))

    @staticmethod
    def size_bytes(features: int) -> int:
        return 4 * features * features

    def add(self, rows: Array) -> None:
        self.matrix += rows.T @ rows
        self.count += len(rows)

    def state(self) -> dict[str, Array]:
        return {"matrix": self.matrix, "count": np.array(self.count)}


class Ranges:
    """How far a layer's input reaches: by feature, and how its magnitudes are spread.

    The histogram's limit doubles when a larger value comes, and neighbouring bins are joined: no
    second pass over the text is needed, and no guess of the range before it.
    """

    def __init__(self, most: Array, counts: Array, limit: float) -> None:
        self.most = most  # [features] f32, largest magnitude
        self.counts = counts  # [BINS] i64 of |x| in [0, limit)
        self.limit = limit  # 0: nothing was seen yet; else a power of two

    @classmethod
    def empty(cls, features: int) -> Self:
        return cls(np.zeros(features, np.float32), np.zeros(BINS, np.int64), 0.0)

    @classmethod
    def of_state(cls, state: Mapping[str, Array]) -> Self:
        return cls(state["most"], state["counts"], float(state["limit"]))

    @staticmethod
    def size_bytes(features: int) -> int:
        return 4 * features + 8 * BINS

    def add(self, rows: Array) -> None:
        magnitudes = np.abs(rows)
        np.maximum(self.most, magnitudes.max(0), out=self.most)
        self._reach(float(magnitudes.max()))
        if self.limit:
            bins = np.minimum((magnitudes * (BINS / self.limit)).astype(np.int64), BINS - 1)
            self.counts += np.bincount(bins.ravel(), minlength=BINS)

    def state(self) -> dict[str, Array]:
        return {"most": self.most, "counts": self.counts, "limit": np.array(self.limit)}

    def _reach(self, value: float) -> None:
        if value == 0:
            return
        if not self.limit:
            self.limit = float(2.0 ** (np.floor(np.log2(value)) + 1))
        while value >= self.limit:
            joined = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.concatenate([joined, np.zeros(BINS // 2, np.int64)])
            self.limit *= 2
