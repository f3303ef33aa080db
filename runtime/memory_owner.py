"""Whose memory an array looks into: what a twin on a device is found by."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def owner_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array whose memory a view looks into."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
