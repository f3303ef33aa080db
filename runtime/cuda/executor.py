"""One engine behind the executor protocol: bind once per shape, run many times, on one stream.

Host arrays stand for device memory: each has a twin, and views share it. Before a call runs, the
inputs that the host writes are copied up; after it, the outputs that the host reads are copied
down. What only engines touch (caches, logits, q between an engine's draft and accept) stays there.
Knows nothing of speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import (
    ANCESTORS,
    NUM_LOGITS,
    GraphSpec,
    TensorSpec,
    check_graph,
    check_tensor,
)
from ..engine_contract import LOGIT_SLOTS, SHAPE_INPUTS, engine_spec
from ..errors import EngineError
from ..executor import Buffers
from ..no_draft import no_draft, with_one_draft
from .call import Bound, CudaCall
from .device import Device
from .memory import ALIGNMENT, Strided
from .plan import Engine

Array = NDArray[Any]
_CACHES = ("past_key_values.", "present.")


class CudaExecutor:
    """A plan whose signature was compared with the contract."""

    def __init__(
        self, device: Device, engine: Engine, spec: GraphSpec, resident: frozenset[str]
    ) -> None:
        self.device = device
        self._engine = engine
        self._contract = spec
        self._spec = engine_spec(spec)
        self._resident = resident
        signature = {n: (engine.dtype(n), _symbolic(engine.shape(n))) for n in engine.inputs}
        outputs = {n: (engine.dtype(n), _symbolic(engine.shape(n))) for n in engine.outputs}
        #: sizes of the symbolic axes that the engine fixes, such as vocab
        self.axes = check_graph(self._spec, signature, outputs, engine.where)
        self.max_context = _max_context(self._spec)
        self._slots = device.memory.device(4 * max(self.max_context, 1))

    @classmethod
    def load(
        cls, device: Device, path: Path, spec: GraphSpec, resident: frozenset[str]
    ) -> CudaExecutor:
        """resident: tensors that only engines touch. Raises EngineError and BundleError."""
        return cls(device, device.open(path), spec, resident)

    def has_input(self, name: str) -> bool:
        return name in self._engine.inputs

    def bind(self, inputs: Buffers, outputs: Buffers) -> CudaCall:
        """As `runtime.executor.Executor.bind`; contents may change, arrays may not."""
        axes: dict[str, int] = {}
        wanted = [one for one in self._spec.inputs if self.has_input(one.name)]
        results = [s for s in self._spec.outputs if s.name in outputs or not s.optional]
        ids = inputs.get("input_ids")
        return CudaCall(
            executor=self,
            inputs=[self._input(one, inputs, axes) for one in wanted],
            outputs=[self._output(one, outputs[one.name], axes) for one in results],
            lengths=inputs.get("past_lengths") if self.max_context else None,
            rows=0 if ids is None else ids.shape[1],
            keep=[*inputs.values(), *outputs.values()],
        )

    def prepare(self, inputs: list[Bound], outputs: list[Bound]) -> Any:
        """An execution context with every address and shape set. Raises EngineError."""
        shapes = {one.name: one.shape for one in inputs}
        context = self.device.context(self._engine, self._engine.profile_for(shapes))
        for one in (*inputs, *outputs):
            if one.name in shapes and not context.set_input_shape(one.name, one.shape):
                raise EngineError(f"{self._engine.where}: {one.name}: shape {one.shape} refused.")
            if not context.set_tensor_address(one.name, one.address):
                raise EngineError(f"{self._engine.where}: {one.name}: its address was refused.")
        if unset := context.infer_shapes():
            raise EngineError(f"{self._engine.where}: received no shape for {list(unset)}.")
        return context

    def move_rows(self, caches: Array, moves: Sequence[tuple[int, int]]) -> None:
        """As `runtime.executor.Executor.move_rows`, on the device and behind what was enqueued
        before: one copy for each row, of all layers and heads."""
        home = self.device.mirrors.address(caches)
        rows, width = caches.shape[-2], caches.shape[-1] * caches.itemsize
        every = Strided(
            width=width, pitch=rows * width, count=caches.size // caches.shape[-1] // rows
        )
        for to, source in moves:
            self.device.memory.strided(home + to * width, home + source * width, every)

    def enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(int(self.device.stream)):
            raise EngineError(
                f"{self._engine.where}: the engine failed while running; see the log."
            )

    def _input(self, spec: TensorSpec, given: Buffers, axes: dict[str, int]) -> Bound:
        if spec in SHAPE_INPUTS:
            return self._slots_of(spec, given)
        array = self._checked(spec, given, axes)
        widened = with_one_draft(spec, array.shape)
        if widened != array.shape:
            return self._padded(spec, array, widened)
        return self._bound(spec, array)

    def _output(self, spec: TensorSpec, array: Array, axes: dict[str, int]) -> Bound:
        check_tensor(spec, _dtype(spec, array), array.shape, axes)
        return self._bound(spec, array)

    def _bound(self, spec: TensorSpec, array: Array) -> Bound:
        """On the array's twin, or on aligned memory of its own beside it."""
        copied = array if self._is_copied(spec.name) else None
        if not array.size:
            return Bound(name=spec.name, address=self._slots.address, shape=array.shape)
        home = address = self.device.mirrors.address(array)
        if home % ALIGNMENT:
            if spec.name.startswith(_CACHES):
                raise EngineError(
                    f"{self._engine.where}: {spec.name}: received a cache that isn't "
                    f"aligned. Expected a multiple of {ALIGNMENT} bytes."
                )
            address = self.device.memory.device(array.nbytes).address
        return Bound(
            name=spec.name, address=address, shape=array.shape, array=copied, home=home,
            size=array.nbytes,
        )  # fmt: skip

    def _slots_of(self, spec: TensorSpec, given: Buffers) -> Bound:
        """The contract's count becomes a length; the context's is chosen when the call runs."""
        size = self.max_context
        if spec == LOGIT_SLOTS:
            size = int(given[NUM_LOGITS.name])
        return Bound(name=spec.name, address=self._slots.address, shape=(size,))

    def _padded(self, spec: TensorSpec, array: Array, shape: tuple[int, ...]) -> Bound:
        """k = 0 as k = 1 whose draft has q = 0: never accepted, and drawn from p (see ranges).

        One row of logits, of uniforms or of allowed tokens comes first in the wider tensor.
        """
        own = no_draft(spec, array, shape)
        address = self.device.mirrors.address(own)
        self.device.memory.to_device(address, own.ctypes.data, own.nbytes)
        if not array.size or spec == ANCESTORS:
            return Bound(name=spec.name, address=address, shape=shape)
        home = self.device.mirrors.address(array)
        copied = array if self._is_copied(spec.name) else None
        return Bound(
            name=spec.name, address=address, shape=shape, array=copied, home=home,
            size=array.nbytes,
        )  # fmt: skip

    def _is_copied(self, name: str) -> bool:
        return name not in self._resident and not name.startswith(_CACHES)

    def _checked(self, spec: TensorSpec, given: Buffers, axes: dict[str, int]) -> Array:
        array = given.get(spec.name)
        if array is None:
            raise EngineError(f"{self._engine.where}: no buffer was given for {spec.name}.")
        check_tensor(spec, _dtype(spec, array), array.shape, axes)
        if not array.flags.c_contiguous:
            raise EngineError(f"{self._engine.where}: the buffer of {spec.name} isn't contiguous.")
        return array


def _symbolic(shape: tuple[int, ...]) -> list[object]:
    """As a graph's signature has it: no number where a call chooses."""
    return [size if size >= 0 else None for size in shape]


def _dtype(spec: TensorSpec, array: Array) -> str:
    """numpy has no bfloat16: its bits are carried as uint16."""
    carried = spec.dtype == "bfloat16" and array.dtype == np.uint16
    return spec.dtype if carried else array.dtype.name


def _max_context(spec: GraphSpec) -> int:
    """Rows of the caches; 0 for a graph without."""
    caches = [one for one in spec.inputs if one.name.startswith(_CACHES)]
    return int(caches[0].axes[2]) if caches else 0
