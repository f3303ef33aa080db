"""A plan from a bundle, opened on the GPU at hand; what doesn't fit is told before it is opened."""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BundleError, EngineError
from ..manifest import EngineCard
from .driver import Gpu
from .kernels import KernelCache

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Least and most shape that one profile takes for one input."""

    least: tuple[int, ...]
    most: tuple[int, ...]

    def hold(self, shape: tuple[int, ...]) -> bool:
        bounds = zip(self.least, shape, self.most, strict=False)
        return len(shape) == len(self.least) and all(a <= b <= c for a, b, c in bounds)


class Library:
    """The installed TensorRT of a bundle's backend."""

    def __init__(self, card: EngineCard) -> None:
        """Raises EngineError for a missing package, BundleError for another version."""
        try:
            self.api: Any = importlib.import_module(_MODULES[card.package])
        except (ImportError, OSError) as error:
            raise EngineError(
                f"{card.package}: received no usable package ({error}). Expected "
                f"{_MODULES[card.package]} {card.version}, which built this bundle's engines; pip "
                f"install 'outrider[{card.package}]'."
            ) from error
        check_version(card, str(self.api.__version__))
        self.runtime = self.api.Runtime(self.api.Logger(self.api.Logger.ERROR))


def check_version(card: EngineCard, installed: str) -> None:
    """A plan runs on the version that built it alone. Raises BundleError."""
    if installed != card.version:
        raise BundleError(
            f"{card.package}: received version {installed}. Expected {card.version}, which built "
            "this bundle's engines, and which alone runs them; install it, or rebuild the bundle."
        )


def check_gpu(card: EngineCard, gpu: Gpu) -> None:
    """Raises BundleError for a GPU that the plans weren't built for."""
    targets = card.compute_capabilities
    if targets and gpu.compute_capability not in targets:
        raise BundleError(
            f"engines: received plans for compute capability {', '.join(map(str, targets))}. "
            f"Expected {gpu.compute_capability}, that of {gpu}; rebuild with --compute-capability "
            f"{gpu.compute_capability}."
        )


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """A plan's bytes, read as they are needed: it may be larger than the memory that is free."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


class Engine:
    """An opened plan: its tensors, its profiles, its contexts."""

    def __init__(
        self, library: Library, path: Path, owner: ExitStack, kernels: KernelCache
    ) -> None:
        self.where = path.name
        self._kernels = kernels
        self._api = library.api
        with mapped(path) as data:
            self._check_validity(library, data)
            engine = library.runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise EngineError(
                f"{path.name}: {library.api.__name__} {library.api.__version__} refused the plan. "
                "Expected one for this GPU and this version; rebuild the bundle."
            )
        self.engine: Any = engine
        owner.callback(self._close)
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        modes = {name: engine.get_tensor_mode(name) for name in names}
        self.inputs = [n for n in names if modes[n] == library.api.TensorIOMode.INPUT]
        self.outputs = [n for n in names if modes[n] != library.api.TensorIOMode.INPUT]

    @property
    def scratch_bytes(self) -> int:
        return int(self.engine.device_memory_size_v2)

    def dtype(self, name: str) -> str:
        """As numpy names it; bfloat16 by its own name."""
        names = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32",
                 "INT64": "int64", "BOOL": "bool", "INT8": "int8"}  # fmt: skip
        kind = str(self.engine.get_tensor_dtype(name)).rpartition(".")[2]
        return names.get(kind, kind)

    def shape(self, name: str) -> tuple[int, ...]:
        """-1 where it is chosen by a call."""
        return tuple(self.engine.get_tensor_shape(name))

    def profile_for(self, shapes: dict[str, tuple[int, ...]]) -> int:
        """The first profile that holds all of them. Raises EngineError naming what doesn't fit."""
        held = [self.profile(i) for i in range(self.engine.num_optimization_profiles)]
        return choose_profile(self.where, held, shapes)

    def profile(self, index: int) -> dict[str, Shapes]:
        found = {}
        for name in self.inputs:
            least, _, most = self.engine.get_tensor_profile_shape(name, index)
            found[name] = Shapes(least=tuple(least), most=tuple(most))
        return found

    def context(self, profile: int, stream: Any, scratch: int, size: int) -> Any:
        """An execution context on the shared scratch memory, with one profile for good."""
        context = self.engine.create_execution_context(self._strategy())
        if context is None:
            raise EngineError(f"{self.where}: received no execution context; see the log.")
        context.set_device_memory(scratch, size)
        if not context.set_optimization_profile_async(profile, stream):
            raise EngineError(f"{self.where}: profile {profile} was refused.")
        return context

    def _strategy(self) -> Any:
        """Scratch memory is given; kernels are there for good once a context has run.

        TensorRT-RTX compiles kernels for the shapes that it meets, by default in the background,
        and would go on to others behind a CUDA graph's back.
        """
        given = self._api.ExecutionContextAllocationStrategy.USER_MANAGED
        specialization = getattr(self._api, "DynamicShapesKernelSpecializationStrategy", None)
        if specialization is None:
            return given
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(given)
        config.dynamic_shapes_kernel_specialization_strategy = specialization.EAGER
        self._kernels.give(config)
        return config

    def _check_validity(self, library: Library, data: mmap.mmap) -> None:
        """TensorRT-RTX tells beforehand, and why."""
        ask = getattr(library.runtime, "get_engine_validity", None)
        if ask is None:
            return
        validity, why = ask(data)
        if validity == library.api.EngineValidity.INVALID:
            raise BundleError(
                f"{self.where}: received a plan that this GPU or this version can't run "
                f"(diagnostics {int(why):#x}). Expected one built for it; rebuild the bundle."
            )

    def keep_kernels(self) -> None:
        """For the next start, what contexts of this engine had to compile."""
        self._kernels.keep()

    def _close(self) -> None:
        self.keep_kernels()
        self.engine = None


def choose_profile(
    where: str, held: list[dict[str, Shapes]], shapes: dict[str, tuple[int, ...]]
) -> int:
    """Raises EngineError naming the input that no profile takes."""
    for index, profile in enumerate(held):
        if all(profile[name].hold(shape) for name, shape in shapes.items()):
            return index
    for name, shape in shapes.items():
        if not any(profile[name].hold(shape) for profile in held):
            least, most = held[0][name].least, held[-1][name].most
            raise EngineError(
                f"{where}: {name}: received {list(shape)}. Expected {list(least)} to {list(most)}, "
                "as the engine's profiles have it; rebuild the bundle with larger limits."
            )
    raise EngineError(
        f"{where}: received {shapes}. Expected shapes that one profile takes together; rebuild the "
        "bundle."
    )
