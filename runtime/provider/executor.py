"""A bundle's graphs behind the executor protocol, on a provider: bound once, run many times.

Decoders take calls of any shape through one session. What only samples has no weights, and its
shapes decide what it computes; so it gets a session for each set of shapes, in which no size is
left to compute and nothing for the CPU to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import ANCESTORS, NUM_LOGITS, GraphSpec, TensorSpec, check_graph, check_tensor
from ..errors import EngineError
from ..executor import Buffers, signature
from ..no_draft import no_draft, with_one_draft
from ..provider_contract import LOGIT_ROWS, QUERY_ROWS, TOTAL_LENGTH
from .call import NOT_CAPTURED, Prepared, ProviderCall
from .sessions import Provider, open_session
from .values import DeviceValue, DeviceValues

Array = NDArray[Any]
_CACHES = ("past_key_values.", "present.")


class ProviderGraph:
    """One graph file on one provider."""

    def __init__(
        self, path: Path, provider: Provider, values: DeviceValues, resident: frozenset[str]
    ) -> None:
        """resident: tensors that only sessions touch, besides caches."""
        self.path, self.provider, self.values = path, provider, values
        self._resident = resident

    def is_resident(self, name: str) -> bool:
        return name in self._resident or name.startswith(_CACHES)

    def open(self, sizes: Mapping[str, int], *, captured: bool = False) -> Any:
        return open_session(self.provider, self.path, sizes, captured=captured)

    def bind(self, binding: Any, tensors: list[_Tensor]) -> None:
        """Each to its address on the device."""
        device, index = self.provider.device, self.provider.index
        for one in tensors:
            address, kind, shape = self.values.address(one.array), one.array.dtype, list(one.shape)
            if one.is_input:
                binding.bind_input(one.name, device, index, kind, shape, address)
            else:
                binding.bind_output(one.name, device, index, kind, shape, address)

    def moved(self, tensors: list[_Tensor], *, is_input: bool) -> list[DeviceValue]:
        """What the host reads or writes, each once."""
        found = [
            self.values.of(one.array)
            for one in tensors
            if one.is_input is is_input and not self.is_resident(one.name)
        ]
        return list({id(one): one for one in found}.values())


class _Tensor:
    """One argument of a call; `shape` may go beyond `array`, into the memory behind it."""

    __slots__ = ("array", "is_input", "name", "shape")

    def __init__(
        self, name: str, array: Array, *, is_input: bool, shape: tuple[int, ...] | None = None
    ) -> None:
        self.name, self.array, self.is_input = name, array, is_input
        self.shape = array.shape if shape is None else shape


class DecoderExecutor:
    """A graph with caches: one session, calls of any shape, a context bucket for each run."""

    def __init__(
        self,
        graph: ProviderGraph,
        spec: GraphSpec,
        *,
        most_captured_rows: int,
        graphs: Iterator[int],
    ) -> None:
        """most_captured_rows: longer calls read prompts, and their lengths seldom come twice.
        graphs: numbers for captured runs, none used before in this session."""
        self._graph, self._spec = graph, spec
        self._session = graph.open({}, captured=graph.provider.captures)
        received = _sides(self._session)
        self.axes = check_graph(spec, *received, graph.path.name)
        self._names = {*received[0], *received[1]}  # the contract's optional ones may be missing
        self._most_captured_rows, self._graphs = most_captured_rows, graphs
        caches = [one for one in spec.inputs if one.name.startswith(_CACHES)]
        self.max_context = int(caches[0].axes[2])

    def has_input(self, name: str) -> bool:
        return name in self._names

    def bind(self, inputs: Buffers, outputs: Buffers) -> ProviderCall:
        """As `runtime.executor.Executor.bind`."""
        ids = inputs["input_ids"]
        rows, axes = ids.shape[1], dict[str, int]()
        given = {**inputs, **_row_inputs(rows, int(inputs.get(NUM_LOGITS.name, np.array(1))))}
        tensors = [
            _Tensor(one.name, _checked(one, given, axes, self._graph), is_input=True)
            for one in self._spec.inputs
            if one.name in self._names and one != TOTAL_LENGTH
        ]
        tensors += [
            _Tensor(one.name, _checked(one, outputs, axes, self._graph), is_input=False)
            for one in self._spec.outputs
            if one.name in self._names and (one.name in outputs or not one.optional)
        ]
        return ProviderCall(
            where=self._graph.path.name,
            prepare=lambda bucket: self._prepare(tensors, rows, bucket),
            inputs=self._graph.moved(tensors, is_input=True),
            outputs=self._graph.moved(tensors, is_input=False),
            lengths=inputs["past_lengths"],
            rows=rows,
            max_context=self.max_context,
        )

    def _prepare(self, tensors: list[_Tensor], rows: int, bucket: int) -> Prepared:
        binding = self._session.io_binding()
        self._graph.bind(binding, tensors)
        total = np.array([bucket], np.int32)
        kind, shape = total.dtype, list(total.shape)
        binding.bind_input(TOTAL_LENGTH.name, "cpu", 0, kind, shape, total.ctypes.data)
        captured = self._graph.provider.captures and rows <= self._most_captured_rows
        number = next(self._graphs) if captured else NOT_CAPTURED
        return Prepared(session=self._session, binding=binding, graph=number, keep=(total, tensors))


class SamplingExecutor:
    """A graph without weights: a session for each set of shapes, opened when it is first run."""

    def __init__(self, graph: ProviderGraph, spec: GraphSpec, sizes: Mapping[str, int]) -> None:
        """sizes: of the axes of some call, whose session is opened at once: it tells whether the
        graph fits this provider and the contract."""
        self._graph, self._spec = graph, spec
        self._sessions: dict[tuple[tuple[str, int], ...], Any] = {}
        self.axes = check_graph(spec, *_sides(self._session(sizes)), graph.path.name)

    def has_input(self, name: str) -> bool:
        return any(one.name == name for one in self._spec.inputs)

    def bind(self, inputs: Buffers, outputs: Buffers) -> ProviderCall:
        """As `runtime.executor.Executor.bind`."""
        axes: dict[str, int] = {}
        tensors = [self._input(one, inputs, axes) for one in self._spec.inputs]
        tensors += [
            _Tensor(one.name, _checked(one, outputs, axes, self._graph), is_input=False)
            for one in self._spec.outputs
        ]
        sizes = _sizes(self._spec, tensors)

        def prepare(_: int) -> Prepared:
            session = self._session(sizes)
            binding = session.io_binding()
            self._graph.bind(binding, tensors)
            return Prepared(session=session, binding=binding, graph=NOT_CAPTURED, keep=tensors)

        return ProviderCall(
            where=self._graph.path.name,
            prepare=prepare,
            inputs=self._graph.moved(tensors, is_input=True),
            outputs=self._graph.moved(tensors, is_input=False),
        )

    def _input(self, spec: TensorSpec, given: Buffers, axes: dict[str, int]) -> _Tensor:
        """With one draft that is never accepted where there is none (`no_draft`)."""
        array = _checked(spec, given, axes, self._graph)
        shape = with_one_draft(spec, array.shape)
        if shape != array.shape and (not array.size or spec == ANCESTORS):
            return _Tensor(spec.name, no_draft(spec, array, shape), is_input=True)
        return _Tensor(spec.name, array, is_input=True, shape=shape)

    def _session(self, sizes: Mapping[str, int]) -> Any:
        key = tuple(sorted(sizes.items()))
        if key not in self._sessions:
            self._sessions[key] = self._graph.open(sizes)
        return self._sessions[key]


def graph_numbers() -> Iterator[int]:
    """For captured runs; 0 is what ONNX Runtime takes where none is said."""
    return count(1)


def _row_inputs(rows: int, logits: int) -> dict[str, Array]:
    every = np.arange(rows, dtype=np.int64)
    return {QUERY_ROWS.name: every, LOGIT_ROWS.name: every[rows - logits :].copy()}


def _checked(spec: TensorSpec, given: Buffers, axes: dict[str, int], graph: ProviderGraph) -> Array:
    array = given.get(spec.name)
    if array is None:
        raise EngineError(f"{graph.path.name}: no buffer was given for {spec.name}.")
    check_tensor(spec, array.dtype.name, array.shape, axes)
    if not array.flags.c_contiguous:
        raise EngineError(f"{graph.path.name}: the buffer of {spec.name} is not contiguous.")
    return array


def _sizes(spec: GraphSpec, tensors: list[_Tensor]) -> dict[str, int]:
    """Of every axis that a call gives its size."""
    shapes = {one.name: one.shape for one in tensors}
    found: dict[str, int] = {}
    for one in spec.inputs:
        for axis, size in zip(one.axes, shapes[one.name], strict=True):
            if isinstance(axis, str):
                found.setdefault(axis, size)
    return found


def _sides(session: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return signature(session.get_inputs()), signature(session.get_outputs())
