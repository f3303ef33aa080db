"""Device memory for the host's arrays: one OrtValue for each, and copies of what changed.

Views look into the value of the array that they are parts of, so that what one call writes there
the next one reads. A resident array is what only sessions touch (caches, logits, q between a draft
and accept): its value is the truth. Of any other the host's array is, before a call and after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory_owner import owner_of
from .sessions import Provider

Array = NDArray[Any]


@dataclass(kw_only=True)
class DeviceValue:
    """`array` on the host, `value` on the device, `known`: the contents there, if not resident."""

    array: Array
    value: Any  # onnxruntime.OrtValue
    known: Array | None = None

    def upload(self) -> None:
        """Where the host's contents aren't the device's already."""
        if self.known is not None and np.array_equal(self.known, self.array):
            return
        self.value.update_inplace(self.array)
        self.known = self.array.copy()

    def download(self) -> None:
        self.array[...] = self.value.numpy()
        self.known = self.array.copy()


class DeviceValues:
    """The values of one provider's device."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._values: dict[int, DeviceValue] = {}

    def of(self, array: Array) -> DeviceValue:
        """Of the array that owns the memory which this one looks into."""
        import onnxruntime as ort

        owner = owner_of(array)
        start = owner.ctypes.data
        if start not in self._values:
            value = ort.OrtValue.ortvalue_from_shape_and_type(
                list(owner.shape), owner.dtype, self._provider.device, self._provider.index
            )
            found = DeviceValue(array=owner, value=value)
            value.update_inplace(owner)  # what nobody has written yet is no garbage
            self._values[start] = found
        return self._values[start]

    def address(self, array: Array) -> int:
        """Of the same element on the device."""
        found = self.of(array)
        return int(found.value.data_ptr()) + (array.ctypes.data - found.array.ctypes.data)

    def upload(self, array: Array) -> None:
        """In any case: of a resident array nobody knows what is there."""
        found = self.of(array)
        found.known = None
        found.upload()

    def download(self, array: Array) -> None:
        self.of(array).download()
