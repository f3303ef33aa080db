"""A round without drafts as one whose only draft has q = 0: no engine gathers from nothing.

Such a draft is never accepted, and what is drawn then has the law of p.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contract import ALLOWED_TOKENS, ANCESTORS, TensorSpec

Array = NDArray[Any]
_LEAST = {"k": 1, "num_q_rows": 1, "k_plus_1": 2}


def with_one_draft(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of accept's input with one draft where there is none; others as they are."""
    least = [_LEAST.get(axis, 0) if isinstance(axis, str) else 0 for axis in spec.axes]
    return tuple(max(size, one) for size, one in zip(shape, least, strict=True))


def no_draft(spec: TensorSpec, array: Array, shape: tuple[int, ...]) -> Array:
    """What stands for a draft that is none: q = 0, anything allowed, seen by itself alone."""
    found = np.zeros(shape, array.dtype)
    if spec.name == ALLOWED_TOKENS.name:
        found[...] = True
    elif spec.name == ANCESTORS.name:
        found[...] = np.tril(np.ones(shape[1:], np.bool_))
    return found
