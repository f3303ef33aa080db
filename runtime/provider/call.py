"""One graph of a provider, bound for one set of shapes and addresses: copy up, run, copy down.

A decoder's call is bound once a context bucket: how many cache rows attention may look at is a
number in the host's memory, which a captured call would keep. So each bucket has a binding, and
where the provider captures, a graph of its own, made in the first run and repeated in all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from ..engine_contract import bucket_for
from ..errors import EngineError
from .values import DeviceValue

Array = NDArray[Any]
NOT_CAPTURED = -1  # what ONNX Runtime takes for a run that isn't


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A session with everything bound. graph: of a captured run; NOT_CAPTURED: none."""

    session: Any
    binding: Any
    graph: int
    keep: Sequence[object] = ()  # bound by address: they must outlive the binding

    def run(self, where: str) -> None:
        import onnxruntime as ort

        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(self.graph))
        try:
            self.session.run_with_iobinding(self.binding, options)
            self.binding.synchronize_outputs()
        except RuntimeError as error:
            raise EngineError(f"{where}: the engine failed while running: {error}") from error


@dataclass(kw_only=True)
class ProviderCall:
    """values: what the host reads or writes, of the inputs and of the outputs.

    lengths, rows, max_context: of a decoder, what its bucket follows from; None: no cache.
    """

    where: str
    prepare: Callable[[int], Prepared]  # for so many cache rows; 0 without a cache
    inputs: list[DeviceValue]
    outputs: list[DeviceValue]
    lengths: Array | None = None
    rows: int = 0
    max_context: int = 0
    _prepared: dict[int, Prepared] = field(default_factory=dict)

    def run(self) -> float:
        """Copy up what changed, run, copy down, wait; returns the seconds it took."""
        start = perf_counter()
        for one in (*self.inputs, *self.outputs):  # what comes back whole goes up whole
            one.upload()
        self._at(self._bucket()).run(self.where)
        for one in self.outputs:
            one.download()
        return perf_counter() - start

    def _bucket(self) -> int:
        if self.lengths is None:
            return 0
        last = int(self.lengths.max()) + self.rows
        if last > self.max_context:
            raise EngineError(
                f"{self.where}: received a call up to cache row {last}. Expected at most "
                f"{self.max_context}; rebuild the bundle with a larger --max-context."
            )
        return bucket_for(last, self.max_context)

    def _at(self, bucket: int) -> Prepared:
        if bucket not in self._prepared:
            self._prepared[bucket] = self.prepare(bucket)
        return self._prepared[bucket]


@dataclass(frozen=True)
class InTurn:
    """Calls of which each reads what the one before it left on the device."""

    calls: Sequence[ProviderCall]

    def run(self) -> float:
        return sum(call.run() for call in self.calls)
