"""One engine prepared for fixed shapes and addresses: copy up, run, copy down.

`run` is the step by itself. `enqueue` is the engine alone, on the stream, with no copy to or from
the host: what a CUDA graph is captured from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ..engine_contract import CONTEXT_SLOTS, bucket_for

if TYPE_CHECKING:
    from .executor import CudaExecutor


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One tensor of a call.

    address: what the engine reads or writes. home: the host array's twin, the same but for a view
    that isn't aligned and for a padded input; `size` bytes are then copied on the device. array: on
    the host, copied up before or down after; None where only engines touch it.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    array: NDArray[Any] | None = None
    home: int = 0
    size: int = 0

    @property
    def moved(self) -> bool:
        return self.size > 0 and self.home != self.address


@dataclass(kw_only=True)
class CudaCall:
    """Prepared but for the context bucket, which follows from the lengths of a run."""

    executor: CudaExecutor
    inputs: list[Bound]
    outputs: list[Bound]
    lengths: NDArray[Any] | None  # past_lengths on the host; None: no cache
    rows: int  # that the call writes
    keep: list[NDArray[Any]]  # they must outlive the call
    _contexts: dict[int, Any] = field(default_factory=dict)

    def run(self) -> float:
        """Copy up, run, copy down, wait; returns the seconds it took."""
        return _run((self,))

    def upload(self) -> None:
        memory = self.executor.device.memory
        for one in self.inputs:
            if one.array is not None:
                memory.to_device(one.home, one.array.ctypes.data, one.array.nbytes)

    def download(self) -> None:
        memory = self.executor.device.memory
        for one in self.outputs:
            if one.array is not None:
                memory.to_host(one.array.ctypes.data, one.home, one.array.nbytes)

    def enqueue(self, context_rows: int) -> None:
        """Put the engine on the stream, reading this many cache rows."""
        memory = self.executor.device.memory
        for one in self.inputs:
            if one.moved:
                memory.on_device(one.address, one.home, one.size)
        self.executor.enqueue(self._context(context_rows))
        for one in self.outputs:
            if one.moved:
                memory.on_device(one.home, one.address, one.size)

    def bucket(self) -> int:
        """Cache rows that are read, by the lengths as they are now."""
        if self.lengths is None:
            return 0
        most = self.executor.max_context  # a call beyond it doesn't fit a profile, which tells
        return bucket_for(min(int(self.lengths.max()) + self.rows, most), most)

    def _context(self, context_rows: int) -> Any:
        """One a bucket: what a CUDA graph was captured with keeps its shapes.

        A draft's cache may be shorter than the bucket.
        """
        rows = min(context_rows, self.executor.max_context)
        if rows not in self._contexts:
            inputs = [_resized(one, rows) for one in self.inputs]
            self._contexts[rows] = self.executor.prepare(inputs, self.outputs)
        return self._contexts[rows]


@dataclass(frozen=True)
class InTurn:
    """Calls of which each reads what the one before it left on the device; at least one."""

    calls: Sequence[CudaCall]

    def run(self) -> float:
        """As `CudaCall.run`."""
        return _run(self.calls)

    def enqueue(self, context_rows: int) -> None:
        """As `CudaCall.enqueue`."""
        for call in self.calls:
            call.enqueue(context_rows)


def _run(calls: Sequence[CudaCall]) -> float:
    start = perf_counter()
    for call in calls:
        call.upload()
    for call in calls:
        call.enqueue(call.bucket())
    for call in calls:
        call.download()
    calls[0].executor.device.synchronize()
    return perf_counter() - start


def _resized(bound: Bound, rows: int) -> Bound:
    return replace(bound, shape=(rows,)) if bound.name == CONTEXT_SLOTS.name else bound
