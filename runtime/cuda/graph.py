"""A CUDA graph: captured from one stream, launched as one piece of work, destroyed by its owner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from .driver import Driver


class CudaGraph:
    """Launches what was enqueued while it was captured; addresses and shapes are those of then."""

    def __init__(self, driver: Driver, stream: Any, executable: Any) -> None:
        self._driver, self._stream, self._executable = driver, stream, executable

    def run(self) -> float:
        """Launch and wait; returns the seconds it took."""
        start = perf_counter()
        self._driver.call("cudaGraphLaunch", self._executable, self._stream)
        self._driver.call("cudaStreamSynchronize", self._stream)
        return perf_counter() - start


def capture(
    driver: Driver, stream: Any, owner: ExitStack, enqueue: Callable[[], None]
) -> CudaGraph:
    """Capture what `enqueue` puts on the stream. Raises EngineError; the stream stays usable."""
    mode = driver.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    driver.call("cudaStreamBeginCapture", stream, mode)
    try:
        enqueue()
    except BaseException:
        driver.api.cudaStreamEndCapture(stream)  # it failed already: this only ends the capture
        raise
    graph = driver.call("cudaStreamEndCapture", stream)
    try:
        executable = driver.call("cudaGraphInstantiate", graph, 0)
    finally:
        driver.call("cudaGraphDestroy", graph)
    owner.callback(driver.call, "cudaGraphExecDestroy", executable)
    return CudaGraph(driver, stream, executable)
