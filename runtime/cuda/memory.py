"""Device memory, and host memory that a device copies from: each with one owner that frees it."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from ..memory_owner import owner_of
from .driver import Driver

ALIGNMENT = 256  # of addresses that engines are given
_TO_DEVICE, _TO_HOST, _ON_DEVICE = (
    "cudaMemcpyHostToDevice",
    "cudaMemcpyDeviceToHost",
    "cudaMemcpyDeviceToDevice",
)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """`size` bytes at `address` on the device."""

    address: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Strided:
    """`count` pieces of `width` bytes, each `pitch` bytes behind the one before."""

    width: int
    pitch: int
    count: int


class Memory:
    """Allocates on one device and one stream; everything is freed when the owner's stack closes."""

    def __init__(self, driver: Driver, stream: Any, owner: ExitStack) -> None:
        self._driver, self._stream, self._owner = driver, stream, owner

    def require(self, needed: int, what: str) -> None:
        """Before anything is allocated. Raises EngineError naming both figures."""
        free = self._driver.free_bytes()
        if needed > free:
            raise EngineError(
                f"device memory: {what}: received {free:,} free bytes. Expected {needed:,}; close "
                "other programs on this GPU, or rebuild with a smaller --max-context."
            )

    def device(self, size: int) -> DeviceMemory:
        """Zeroed memory."""
        address = int(self._driver.call("cudaMalloc", max(1, size)))
        self._owner.callback(self._driver.call, "cudaFree", address)
        self._driver.call("cudaMemsetAsync", address, 0, max(1, size), self._stream)
        return DeviceMemory(address=address, size=size)

    def pinned(self, size: int) -> NDArray[Any]:
        """Host bytes that a copy reads and writes at its own time: what a captured round needs."""
        address = int(self._driver.call("cudaHostAlloc", max(1, size), 0))
        self._owner.callback(self._driver.call, "cudaFreeHost", address)
        buffer = (ctypes.c_byte * max(1, size)).from_address(address)
        found: NDArray[Any] = np.ctypeslib.as_array(buffer).view(np.uint8)
        found[:] = 0
        return found[:size]

    def to_device(self, address: int, source: int, size: int) -> None:
        self._copy(address, source, size, _TO_DEVICE)

    def to_host(self, address: int, source: int, size: int) -> None:
        self._copy(address, source, size, _TO_HOST)

    def on_device(self, address: int, source: int, size: int) -> None:
        self._copy(address, source, size, _ON_DEVICE)

    def strided(self, address: int, source: int, pieces: Strided) -> None:
        """On the device, from one place to another of the same memory; no byte is in both."""
        kind = getattr(self._driver.api.cudaMemcpyKind, _ON_DEVICE)
        pitch = pieces.pitch
        self._driver.call(
            "cudaMemcpy2DAsync", address, pitch, source, pitch, pieces.width, pieces.count, kind,
            self._stream,
        )  # fmt: skip

    def _copy(self, target: int, source: int, size: int, kind: str) -> None:
        if size:
            which = getattr(self._driver.api.cudaMemcpyKind, kind)
            self._driver.call("cudaMemcpyAsync", target, source, size, which, self._stream)


class Mirrors:
    """A device twin for every host array that calls are bound to, found by the array's address.

    Views share the twin of the array that they look into, so that what one call writes on the
    device the next one reads there.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._twins: dict[int, DeviceMemory] = {}
        self._arrays: list[NDArray[Any]] = []  # their addresses must stay theirs

    def address(self, array: NDArray[Any]) -> int:
        """Of the same element on the device."""
        base = owner_of(array)
        start = base.ctypes.data
        if start not in self._twins:
            self._twins[start] = self._memory.device(base.nbytes)
            self._arrays.append(base)
        return self._twins[start].address + (array.ctypes.data - start)
