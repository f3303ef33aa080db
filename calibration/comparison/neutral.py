"""A value that changes nothing for every input that a graph's contract asks for.

A comparison sets temperature and uniforms and leaves the rest alone; an input that the contract
gains needs an entry here only where zero isn't what changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.contract import TensorSpec

Array = NDArray[Any]

_NOT_ZERO = ("top_p", "num_logits", "repetition_penalty", "allowed_tokens")  # 1, or true


def neutral_inputs(specs: Iterable[TensorSpec], sizes: Mapping[str, int]) -> dict[str, Array]:
    """Arrays by name; an axis that `sizes` doesn't know is empty."""
    return {spec.name: _neutral(spec, sizes) for spec in specs}


def _neutral(spec: TensorSpec, sizes: Mapping[str, int]) -> Array:
    shape = [axis if isinstance(axis, int) else sizes.get(axis, 0) for axis in spec.axes]
    return np.full(shape, spec.name in _NOT_ZERO, spec.dtype)
