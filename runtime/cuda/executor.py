"""One engine behind the executor protocol: bind once per shape, run many times, on one stream.

Host arrays stand for device memory: each has a twin, and views share it. Before a call runs, the
inputs that the host writes are copied up; after it, the outputs that the host reads are copied
down. What only engines touch (caches, logits, q between an engine's draft and accept) stays there.
Knows nothing of speculation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import NUM_LOGITS, GraphSpec, TensorSpec, check_graph, check_tensor
from ..engine_contract import CONTEXT_SLOTS, LOGIT_SLOTS, SHAPE_INPUTS, bucket_for, engine_spec
from ..errors import EngineError
from ..executor import Buffers
from .device import Device
from .plan import Engine

Array = NDArray[Any]
_CACHES = ("past_key_values.", "present.")


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """One tensor of a call: a host array's twin, or memory of the call's own."""

    name: str
    address: int
    shape: tuple[int, ...]
    array: Array | None = None  # copied up before, or down after, the call


@dataclass(kw_only=True)
class CudaCall:
    """One engine prepared for one set of shapes but for the context bucket."""

    executor: CudaExecutor
    inputs: list[_Bound]
    outputs: list[_Bound]
    lengths: Array | None  # past_lengths on the host: which bucket holds the rows
    rows: int  # that the call writes
    keep: list[Any]  # arrays that must outlive the call
    pads: list[tuple[int, int, int]] = field(default_factory=list)  # device copies: to, from, bytes
    _contexts: dict[int, Any] = field(default_factory=dict)

    def run(self) -> float:
        """Copy up, run, copy down, wait; returns the seconds it took."""
        start = perf_counter()
        memory = self.executor.device.memory
        for bound in self.inputs:
            if bound.array is not None:
                memory.to_device(bound.address, bound.array.ctypes.data, bound.array.nbytes)
        self.enqueue(self._bucket())
        for bound in self.outputs:
            if bound.array is not None:
                memory.to_host(bound.array.ctypes.data, bound.address, bound.array.nbytes)
        self.executor.device.synchronize()
        return perf_counter() - start

    def enqueue(self, context_rows: int) -> None:
        """Put the engine alone on the stream, reading this many cache rows; copies nothing."""
        for to, source, size in self.pads:
            self.executor.device.memory.on_device(to, source, size)
        self.executor.enqueue(self._context(context_rows))

    def _bucket(self) -> int:
        if self.lengths is None:
            return 0
        return bucket_for(int(self.lengths.max()) + self.rows, self.executor.max_context)

    def _context(self, context_rows: int) -> Any:
        """A context a bucket: one that a CUDA graph was captured with keeps its shapes."""
        if context_rows not in self._contexts:
            self._contexts[context_rows] = self.executor.prepare(
                [_resized(one, context_rows) for one in self.inputs], self.outputs
            )
        return self._contexts[context_rows]


def _resized(bound: _Bound, context_rows: int) -> _Bound:
    if bound.name != CONTEXT_SLOTS.name:
        return bound
    return _Bound(name=bound.name, address=bound.address, shape=(context_rows,))


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

    def bind(self, inputs: Buffers, outputs: Buffers) -> CudaCall:
        """As `runtime.executor.Executor.bind`; contents may change, arrays may not."""
        axes: dict[str, int] = {}
        pads: list[tuple[int, int, int]] = []
        bound = [
            self._input(s, inputs, axes, pads) for s in self._spec.inputs if _wanted(s, inputs)
        ]
        results = [
            self._output(one, outputs[one.name], axes)
            for one in self._spec.outputs
            if one.name in outputs or not one.optional
        ]
        lengths = inputs.get("past_lengths") if self.max_context else None
        ids = inputs.get("input_ids")
        return CudaCall(
            executor=self,
            inputs=bound,
            outputs=results,
            lengths=lengths,
            rows=0 if ids is None else ids.shape[1],
            keep=[*inputs.values(), *outputs.values()],
            pads=pads,
        )

    def prepare(self, inputs: list[_Bound], outputs: list[_Bound]) -> Any:
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

    def enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(int(self.device.stream)):
            raise EngineError(
                f"{self._engine.where}: the engine failed while running; see the log."
            )

    def _input(
        self, spec: TensorSpec, given: Buffers, axes: dict[str, int], pads: list[Any]
    ) -> _Bound:
        if spec.name in (one.name for one in SHAPE_INPUTS):
            return self._slots_of(spec, given)
        array = self._checked(spec, given, axes)
        widened = _without_zeros(spec, array.shape)
        if widened != array.shape:
            return self._padded(spec, array, widened, pads)
        copied = array if self._is_copied(spec.name) else None
        address = self.device.mirrors.address(array)
        return _Bound(name=spec.name, address=address, shape=array.shape, array=copied)

    def _output(self, spec: TensorSpec, array: Array, axes: dict[str, int]) -> _Bound:
        check_tensor(spec, _dtype(spec, array), array.shape, axes)
        copied = array if self._is_copied(spec.name) else None
        address = self.device.mirrors.address(array)
        return _Bound(name=spec.name, address=address, shape=array.shape, array=copied)

    def _slots_of(self, spec: TensorSpec, given: Buffers) -> _Bound:
        """The contract's count becomes a length; the context's is chosen when the call runs."""
        size = self.max_context
        if spec.name == LOGIT_SLOTS.name:
            size = int(given[NUM_LOGITS.name])
        return _Bound(name=spec.name, address=self._slots.address, shape=(size,))

    def _padded(
        self, spec: TensorSpec, array: Array, shape: tuple[int, ...], pads: list[Any]
    ) -> _Bound:
        """k = 0 as k = 1 whose draft has q = 0: never accepted, and drawn from p (see ranges)."""
        size = math.prod(shape) * array.itemsize
        own = self.device.memory.device(size)
        if array.dtype == np.bool_:
            self.device.memory.fill(own, 1)
        if array.size:
            pads.append((own.address, self.device.mirrors.address(array), array.nbytes))
        return _Bound(name=spec.name, address=own.address, shape=shape)

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


def _wanted(spec: TensorSpec, given: Mapping[str, Array]) -> bool:
    return not spec.optional or spec.name in given


def _without_zeros(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with one draft where there is none: engines gather from at least one."""
    names = [axis for axis in spec.axes if isinstance(axis, str)]
    if "k" in names and 0 in shape:
        return tuple(max(1, size) for size in shape)
    if "k_plus_1" in names and shape[1] == 1:
        return (shape[0], 2, *shape[2:])
    return shape


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
