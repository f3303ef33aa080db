"""A device that is this machine: CUDA's calls on host memory, engines that are ONNX Runtime's.

What it keeps of the real one: memory is separate from the host's arrays and starts as garbage
freshly after a free; nothing moves but by a copy; while a stream is captured nothing runs, and a
launch repeats what was enqueued then, with the addresses and shapes of then. Shapes are compiled
when they are first met, unless a runtime cache knows them, and never while a stream is captured.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from engines.tensorrt.build import Plan
from engines.tensorrt.ranges import Profile

VERSION = "0.0"
ALIGNMENT = 256


class FakeError(int):
    name = "cudaErrorFake"


@dataclass(kw_only=True)
class FakeCuda:
    """`cuda.bindings.runtime`, as far as the runtime calls it."""

    free: int = 1 << 34
    capability: tuple[int, int] = (8, 9)
    blocks: dict[int, np.ndarray] = field(default_factory=dict)
    recording: list[Callable[[], None]] | None = None
    launches: int = 0
    copies: list[str] = field(default_factory=list)  # kinds, outside captures and inside launches
    compiled: int = 0  # shapes that no cache had
    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(
        cudaMemcpyHostToDevice="up", cudaMemcpyDeviceToHost="down", cudaMemcpyDeviceToDevice="on"
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=0)

    def do(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
        else:
            work()

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return 0, 1

    def cudaSetDevice(self, _index: int) -> tuple[int]:
        return (0,)

    def cudaGetDeviceProperties(self, _index: int) -> tuple[int, Any]:
        major, minor = self.capability
        return 0, SimpleNamespace(name=b"Fake", major=major, minor=minor)

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self.free, self.free

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        assert self.recording is None, "allocated while a stream was captured"
        raw = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        address = -(-raw.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.blocks[address] = raw
        self.free -= size
        return 0, address

    cudaHostAlloc = lambda self, size, _flags: self.cudaMalloc(size)  # noqa: E731

    def cudaFree(self, address: int) -> tuple[int]:
        self.free += len(self.blocks.pop(address)) - ALIGNMENT
        return (0,)

    cudaFreeHost = cudaFree

    def cudaMemsetAsync(self, address: int, byte: int, size: int, _stream: Any) -> tuple[int]:
        self.do(lambda: ctypes.memset(address, byte, size) and None)
        return (0,)

    def cudaMemcpyAsync(
        self, to: int, source: int, size: int, kind: str, _stream: Any
    ) -> tuple[int]:
        def copy() -> None:
            self.copies.append(kind)
            ctypes.memmove(to, source, size)

        self.do(copy)
        return (0,)

    def cudaMemcpy2DAsync(
        self,
        to: int,
        to_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        count: int,
        kind: str,
        _stream: Any,
    ) -> tuple[int]:
        def copy() -> None:
            self.copies.append(kind)
            for i in range(count):
                ctypes.memmove(to + i * to_pitch, source + i * source_pitch, width)

        self.do(copy)
        return (0,)

    def cudaStreamCreateWithFlags(self, _flags: int) -> tuple[int, int]:
        return 0, 7

    def cudaStreamDestroy(self, _stream: Any) -> tuple[int]:
        return (0,)

    def cudaStreamSynchronize(self, _stream: Any) -> tuple[int]:
        assert self.recording is None, "waited while a stream was captured"
        return (0,)

    def cudaStreamBeginCapture(self, _stream: Any, _mode: int) -> tuple[int]:
        self.recording = []
        return (0,)

    def cudaStreamEndCapture(self, _stream: Any) -> tuple[int, Any]:
        work, self.recording = self.recording, None
        return 0, work

    def cudaGraphInstantiate(self, graph: Any, _flags: int) -> tuple[int, Any]:
        return 0, list(graph)

    def cudaGraphDestroy(self, _graph: Any) -> tuple[int]:
        return (0,)

    def cudaGraphExecDestroy(self, _executable: Any) -> tuple[int]:
        return (0,)

    def cudaGraphLaunch(self, executable: Any, _stream: Any) -> tuple[int]:
        self.launches += 1
        for work in executable:
            work()
        return (0,)

    def cudaGetErrorString(self, _error: Any) -> tuple[int, bytes]:
        return 0, b"fake"


class FakeKernels:
    """`IRuntimeCache`: the shapes that were compiled."""

    def __init__(self) -> None:
        self.shapes: set[str] = set()

    def serialize(self) -> bytes:
        return json.dumps([VERSION, *sorted(self.shapes)]).encode()

    def deserialize(self, blob: bytes) -> bool:
        try:
            version, *shapes = json.loads(blob)
        except ValueError:
            return False
        if version == VERSION:
            self.shapes |= set(shapes)
        return bool(version == VERSION)


class FakeConfig:
    """`IRuntimeConfig`."""

    def __init__(self) -> None:
        self.kernels = FakeKernels()
        self.dynamic_shapes_kernel_specialization_strategy = "LAZY"
        self.allocation: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.allocation = strategy

    def create_runtime_cache(self) -> FakeKernels:
        return FakeKernels()

    def set_runtime_cache(self, cache: FakeKernels) -> bool:
        self.kernels = cache
        return True


class FakeContext:
    def __init__(self, engine: FakeEngine, config: FakeConfig) -> None:
        assert config.dynamic_shapes_kernel_specialization_strategy == "EAGER"
        assert config.allocation == "USER_MANAGED"
        self._engine = engine
        self._kernels = config.kernels.shapes
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % ALIGNMENT == 0
        assert size >= self._engine.device_memory_size_v2

    def set_optimization_profile_async(self, profile: int, _stream: int) -> bool:
        return profile < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % ALIGNMENT == 0, f"{name} isn't aligned"
        self._addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        return [i.name for i in self._engine.session.get_inputs() if i.name not in self._shapes]

    def execute_async_v3(self, _stream: int) -> bool:
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        if str(shapes) not in self._kernels:
            assert self._engine.cuda.recording is None, "compiled while a stream was captured"
            self._engine.cuda.compiled += 1
            self._kernels.add(str(shapes))
        self._engine.cuda.do(lambda: self._engine.run(shapes, addresses))
        return True


_NUMPY = {"tensor(float)": ("FLOAT", np.float32), "tensor(float16)": ("HALF", np.float16),
          "tensor(int64)": ("INT64", np.int64), "tensor(int32)": ("INT32", np.int32),
          "tensor(bool)": ("BOOL", np.bool_)}  # fmt: skip


class FakeEngine:
    device_memory_size_v2 = 4096

    def __init__(self, data: bytes, cuda: FakeCuda) -> None:
        self.cuda = cuda
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self._tensors = {
            t.name: t for t in (*self.session.get_inputs(), *self.session.get_outputs())
        }
        self._inputs = {i.name for i in self.session.get_inputs()}
        metadata = self.session.get_modelmeta().custom_metadata_map
        self._profiles = json.loads(metadata["profiles"])
        self.num_optimization_profiles = len(self._profiles)
        self.num_io_tensors = len(self._tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name in self._inputs else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> str:
        return "DataType." + _NUMPY[self._tensors[name].type][0]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [d if isinstance(d, int) else -1 for d in self._tensors[name].shape]

    def get_tensor_profile_shape(self, name: str, index: int) -> list[list[int]]:
        return self._profiles[index].get(name) or [self.get_tensor_shape(name)] * 3

    def get_aliased_input_tensor(self, name: str) -> str:
        return name.replace("present", "past_key_values")

    def create_runtime_config(self) -> FakeConfig:
        return FakeConfig()

    def create_execution_context(self, config: FakeConfig) -> FakeContext:
        return FakeContext(self, config)

    def run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        binding, axes = self.session.io_binding(), dict[str, int]()
        for one in self.session.get_inputs():
            axes |= {
                d: size for d, size in zip(one.shape, shapes[one.name], strict=True)
                if isinstance(d, str)
            }  # fmt: skip
            dtype = _NUMPY[one.type][1]
            binding.bind_input(one.name, "cpu", 0, dtype, shapes[one.name], addresses[one.name])
        for one in self.session.get_outputs():
            shape = [d if isinstance(d, int) else axes[d] for d in one.shape]
            dtype = _NUMPY[one.type][1]
            binding.bind_output(one.name, "cpu", 0, dtype, shape, addresses[one.name])
        self.session.run_with_iobinding(binding)


def fake_tensorrt(cuda: FakeCuda) -> Any:
    """The module that a plan is opened with."""
    runtime = SimpleNamespace(
        deserialize_cuda_engine=lambda data: FakeEngine(bytes(data), cuda),
        get_engine_validity=lambda _data: (SimpleNamespace(name="VALID"), 0),
    )
    return SimpleNamespace(
        __name__="tensorrt_rtx",
        __version__=VERSION,
        Runtime=lambda _logger: runtime,
        Logger=type("Logger", (), {"ERROR": 1, "__init__": lambda self, _level: None}),
        TensorIOMode=SimpleNamespace(INPUT="INPUT"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="USER_MANAGED"),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="EAGER"),
        EngineValidity=SimpleNamespace(INVALID="INVALID"),
    )


def fake_plan(
    _library: Any, path: Path, profiles: Sequence[Profile], _options: Any, _timing: Any
) -> Plan:
    """The graph itself, with its weights inside and its profiles beside."""
    model = ir.load(path)
    shapes = [{str(v.name): p.shapes(v) for v in model.graph.inputs} for p in profiles]
    proto = onnx.load(path)
    onnx.helper.set_model_props(proto, {"profiles": json.dumps(shapes)})
    return Plan(data=proto.SerializeToString(), warnings=(), weight_bytes=0)


def use_fake_device(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    from runtime.cuda import driver, plan

    monkeypatch.setattr(driver.Driver, "__init__", lambda self: setattr(self, "api", cuda))
    module = fake_tensorrt(cuda)
    monkeypatch.setattr(plan, "importlib", SimpleNamespace(import_module=lambda _name: module))
