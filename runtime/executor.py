"""One ONNX Runtime session behind fixed buffers: load, bind once per shape, run many times.

Knows nothing of speculation. Invariant: a `Call` reads and writes the arrays that it was bound to,
by address, and keeps them alive; between runs only their contents change, nothing is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .contract import GraphSpec, TensorSpec, check_graph, check_tensor
from .errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    import onnxruntime

Buffers = Mapping[str, NDArray[Any]]

_NUMPY_NAMES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int8)": "int8",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a session uses the machine.

    threads: None takes the cores this process may run on. spin: during a run, workers wait busily
    for the next operator: a tenth to a quarter faster where the cores are this process's own,
    several times slower where other processes want them. as_written: compute DequantizeLinear where
    the graph has it, in f32; else ONNX Runtime may round activations where it meets such weights.
    """

    threads: int | None = None
    spin: bool = True
    as_written: bool = False

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise InvalidRequest(
                f"threads: received {self.threads}. Expected at least 1, or None for all cores."
            )

    def resolved_threads(self) -> int:
        if self.threads is not None:
            return self.threads
        if hasattr(os, "sched_getaffinity"):  # Linux alone
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1


class Call:
    """One graph prepared for one set of shapes; `run` returns the seconds it took."""

    __slots__ = ("_arrays", "_binding", "_session", "_where")

    def __init__(self, session: Any, binding: Any, arrays: Sequence[NDArray[Any]], where: str):
        self._session = session
        self._binding = binding
        self._arrays = arrays  # bound by address: they must outlive the binding
        self._where = where

    def run(self) -> float:
        start = perf_counter()
        try:
            self._session.run_with_iobinding(self._binding)
        except RuntimeError as error:
            raise EngineError(f"{self._where}: the engine failed while running: {error}") from error
        return perf_counter() - start


class Executor:
    """A loaded graph whose signature was compared with the contract."""

    def __init__(self, session: onnxruntime.InferenceSession, spec: GraphSpec, where: str) -> None:
        self._session = session
        self._spec = spec
        self._where = where
        self._inputs = {one.name for one in session.get_inputs()}
        self._outputs = {output.name for output in session.get_outputs()}
        #: sizes of the symbolic axes that the graph fixes, such as vocab
        self.axes = check_graph(
            spec, _inputs(session, spec), signature(session.get_outputs()), where
        )

    @classmethod
    def load(cls, path: Path, spec: GraphSpec, options: EngineOptions) -> Executor:
        """Open the graph at `path`; raises EngineError where it does not load or fit `spec`."""
        import onnxruntime

        try:
            session = onnxruntime.InferenceSession(
                path, _session_options(options), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime raises a dozen unrelated types
            raise EngineError(f"{path.name}: ONNX Runtime refused the graph: {error}") from error
        return cls(session, spec, path.name)

    def has_input(self, name: str) -> bool:
        return name in self._inputs

    def bind(self, inputs: Buffers, outputs: Buffers) -> Call:
        """Prepare one call; every array must be C-contiguous and fit the contract.

        What is given for an optional input that the graph lacks is left out.
        An optional output without a buffer is left to the engine, which frees it.
        """
        axes: dict[str, int] = {}
        binding = self._session.io_binding()
        given = [spec for spec in self._spec.switches if spec.name in inputs]
        wanted = [spec for spec in self._spec.inputs if self.has_input(spec.name)]
        for spec in (*wanted, *given):
            array = self._checked(spec, inputs, axes)
            binding.bind_input(
                spec.name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data
            )
        for spec in self._spec.outputs:
            if spec.optional and spec.name not in outputs:
                continue
            if spec.name not in self._outputs:
                raise EngineError(
                    f"{self._where}: received a graph without {spec.name}. Expected it among the "
                    "outputs: a drafter reads it; rebuild the bundle."
                )
            array = self._checked(spec, outputs, axes)
            binding.bind_output(
                spec.name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data
            )
        return Call(self._session, binding, [*inputs.values(), *outputs.values()], self._where)

    def move_rows(self, caches: NDArray[Any], moves: Sequence[tuple[int, int]]) -> None:
        """Of caches [caches, batch, heads, rows, size] that calls are bound to: (to, from), all at
        once. No row is moved to where a later one comes from."""
        to, source = (list(places) for places in zip(*moves, strict=True))
        caches[..., to, :] = caches[..., source, :]

    def _checked(self, spec: TensorSpec, given: Buffers, axes: dict[str, int]) -> NDArray[Any]:
        array = given.get(spec.name)
        if array is None:
            raise EngineError(f"{self._where}: no buffer was given for {spec.name}.")
        check_tensor(spec, array.dtype.name, array.shape, axes)
        if not array.flags.c_contiguous:
            raise EngineError(f"{self._where}: the buffer of {spec.name} is not contiguous.")
        return array


def _session_options(options: EngineOptions) -> onnxruntime.SessionOptions:
    import onnxruntime

    result = onnxruntime.SessionOptions()
    result.intra_op_num_threads = options.resolved_threads()
    result.inter_op_num_threads = 1
    result.log_severity_level = 4  # what it would log comes as an exception, and is raised
    result.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.spin)))
    result.add_session_config_entry("session.disable_quant_qdq", str(int(options.as_written)))
    # Target, draft and accept have a pool each: workers that spun on after their own graph's run
    # would take the cores from the next one's. On 2 cores rounds then take twice as long.
    result.add_session_config_entry("session.force_spinning_stop", "1")
    # Products of 8-bit numbers: without it sums overflow on processors with AVX2 and no VNNI.
    result.add_session_config_entry("session.x64quantprecision", "1")
    return result


def _inputs(
    session: onnxruntime.InferenceSession, spec: GraphSpec
) -> dict[str, tuple[str, Sequence[object]]]:
    """What must be given, and the switches that this contract knows."""
    known = {switch.name for switch in spec.switches}
    switches = [one for one in session.get_overridable_initializers() if one.name in known]
    return signature([*session.get_inputs(), *switches])


def signature(arguments: Sequence[Any]) -> dict[str, tuple[str, Sequence[object]]]:
    return {a.name: (_NUMPY_NAMES.get(a.type, a.type), a.shape) for a in arguments}


def stacked_caches(
    specs: Sequence[TensorSpec], shape: tuple[int, ...]
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """The same in one array [caches, *shape], of which each is a part: rows move in all at once."""
    whole = np.zeros((len(specs), *shape), _carrier(specs[0].dtype))
    return whole, {spec.name: whole[i] for i, spec in enumerate(specs)}


def cache_buffers(specs: Sequence[TensorSpec], shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Zeroed cache arrays by name; bind them as past and as present to update them in place."""
    return {spec.name: np.zeros(shape, _carrier(spec.dtype)) for spec in specs}


def _carrier(dtype: str) -> str:
    """numpy has no bfloat16: its bits are carried as uint16, which nobody here computes with."""
    return "uint16" if dtype == "bfloat16" else dtype
