"""Small tensors of one round in one block of memory, so that one copy moves them all.

Fields lie in the order in which they are declared: what the host writes first, what both write in
the middle, what only the round writes last. `up` is what is copied before a launch, `down` after
it; they overlap in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ALIGNMENT = 256  # an engine may want so much of any address
Allocate = Callable[[int], NDArray[Any]]  # bytes → zeroed u8 [bytes]


@dataclass(frozen=True, kw_only=True)
class Field:
    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(np.dtype(self.dtype).itemsize)


class Arena:
    """`host`: written by the host alone; `shared`: by both; `round`: by the round alone."""

    def __init__(
        self,
        *,
        host: Sequence[Field],
        shared: Sequence[Field],
        round: Sequence[Field],
        allocate: Allocate,
    ) -> None:
        fields = (*host, *shared, *round)
        starts, end = [], 0
        for field in fields:
            starts.append(end)
            end += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
        self.memory = allocate(end)
        self.fields = {
            field.name: _view(self.memory, start, field)
            for field, start in zip(fields, starts, strict=True)
        }
        ends = [*starts, end]
        self.up = self.memory[: ends[len(host) + len(shared)]]
        self.down = self.memory[ends[len(host)] :]

    def __getitem__(self, name: str) -> Array:
        return self.fields[name]


def on_host(size: int) -> NDArray[Any]:
    """Plain memory, for engines that run where the host does."""
    return np.zeros(size, np.uint8)


def _view(memory: NDArray[Any], start: int, field: Field) -> Array:
    found: Array = memory[start : start + field.nbytes].view(field.dtype).reshape(field.shape)
    return found
