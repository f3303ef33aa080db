"""One GPU for one bundle: its stream, its memory, its engines; a context manager that frees all.

Every engine's context works in one shared scratch memory, since calls follow one another on one
stream. Nothing is allocated before the bundle was compared with the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from ..manifest import Manifest
from .driver import Driver
from .graph import CudaGraph, capture
from .kernels import KernelCache, KernelFolder
from .memory import DeviceMemory, Memory, Mirrors
from .plan import Engine, Library, check_gpu

Array = NDArray[Any]
SPARE_BYTES = (
    256 << 20
)  # for the driver, kernels and what else is allocated beside plans and caches


class Enqueued(Protocol):
    """A bound call of an engine."""

    def run(self) -> float: ...
    def enqueue(self, context_rows: int) -> None: ...


class Device:
    """Open with the bundle's manifest; close, or leave the `with` block, to free everything."""

    def __init__(self, path: Path, manifest: Manifest, index: int = 0) -> None:
        """Raises BundleError and EngineError before anything is allocated."""
        card = manifest.engines
        if card is None:
            raise EngineError("received a bundle without engines. Expected a TensorRT backend's.")
        self._owner = ExitStack()
        self._library = Library(card)
        self._files = manifest.files
        self._kernels = KernelFolder()
        self._engines: list[Engine] = []
        self.driver = Driver()
        self.gpu = self.driver.gpu(index)
        check_gpu(card, self.gpu)
        try:
            self._open(path, manifest)
        except BaseException:
            self._owner.close()
            raise

    def _open(self, path: Path, manifest: Manifest) -> None:
        call = self.driver.call
        self.stream = call("cudaStreamCreateWithFlags", self.driver.api.cudaStreamNonBlocking)
        self._owner.callback(call, "cudaStreamDestroy", self.stream)
        self._owner.callback(call, "cudaStreamSynchronize", self.stream)
        self.memory = Memory(self.driver, self.stream, self._owner)
        self.memory.require(needed_bytes(path, manifest), "plans, caches and their scratch")
        self.mirrors = Mirrors(self.memory)
        self._scratch: DeviceMemory | None = None
        self._scratch_bytes = 0

    def open(self, path: Path) -> Engine:
        """All engines are opened before the first call is bound: the scratch fits the largest."""
        engine = Engine(self._library, path, self._owner, self._kernels_of(path))
        if self._scratch is not None and engine.scratch_bytes > self._scratch_bytes:
            raise EngineError(f"{path.name}: opened after calls were bound. Expected before.")
        self._scratch_bytes = max(self._scratch_bytes, engine.scratch_bytes)
        self._engines.append(engine)
        return engine

    def _kernels_of(self, plan: Path) -> KernelCache:
        made = self._files[f"engines/{plan.name}"].sha256[:16]
        name = f"{plan.stem}-{made}-sm{self.gpu.compute_capability}.kernels"
        return KernelCache(self._kernels, name)

    def context(self, engine: Engine, profile: int) -> Any:
        if self._scratch is None:
            self.memory.require(self._scratch_bytes, "the engines' scratch memory")
            self._scratch = self.memory.device(self._scratch_bytes)
        return engine.context(profile, int(self.stream), self._scratch.address, self._scratch_bytes)

    def synchronize(self) -> None:
        self.driver.call("cudaStreamSynchronize", self.stream)

    def capture(
        self,
        calls: Sequence[Enqueued],
        context_rows: int,
        up: Array,
        down: Array,
    ) -> CudaGraph:
        """One CUDA graph: copy `up` from pinned memory, run the calls, copy `down`.

        Each call runs once before: its constants are copied up, and TensorRT allocates and compiles
        what it puts off, which is kept for the next start. Its inputs are those of a round, so it
        writes no cache row that is valid.
        """
        for one in calls:
            one.run()

        def enqueue() -> None:
            twin = self.mirrors.address
            self.memory.to_device(twin(up), up.ctypes.data, up.nbytes)
            for one in calls:
                one.enqueue(context_rows)
            self.memory.to_host(down.ctypes.data, twin(down), down.nbytes)

        enqueue()
        self.synchronize()
        for engine in self._engines:
            engine.keep_kernels()
        return capture(self.driver, self.stream, self._owner, enqueue)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A host array that a captured copy may read at its own time."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        found: Array = self.memory.pinned(size).view(kind).reshape(shape)
        return found

    def free_bytes(self) -> int:
        return self.driver.free_bytes()

    def close(self) -> None:
        self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def needed_bytes(path: Path, manifest: Manifest) -> int:
    """Plans, caches and a margin: what is known before an engine is opened."""
    plans = sum(r.bytes for name, r in manifest.files.items() if name.startswith("engines/"))
    cards = [card for card in (manifest.target, manifest.draft_model) if card is not None]
    caches = sum(card.cache.bytes(manifest.limits.max_batch) for card in cards)
    return plans + caches + SPARE_BYTES
