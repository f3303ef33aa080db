"""CUDA's runtime API with every call checked; the only importer of `cuda.bindings`.

One owner a resource: whatever is opened here is closed by the `ExitStack` of the device that opened
it, in the opposite order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import EngineError

_NO_DRIVER = {"cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorInitializationError"}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a bundle's plans are compared with."""

    index: int
    name: str
    compute_capability: int  # such as 89

    def __str__(self) -> str:
        return f"{self.name} (SM{self.compute_capability})"


class Driver:
    """`cuda.bindings.runtime`, whose calls return (error, values…)."""

    def __init__(self) -> None:
        """Raises EngineError without the package."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise EngineError(
                f"CUDA: received no cuda.bindings ({error}). Expected it: this bundle's engines "
                "run on a GPU; pip install 'outrider[tensorrt-rtx]', or build with --backend "
                "onnxruntime."
            ) from error
        self.api = runtime

    def call(self, name: str, *arguments: Any) -> Any:
        """Call `name`; returns its value, None, or a tuple of values. Raises EngineError."""
        error, *values = getattr(self.api, name)(*arguments)
        if int(error) != 0:
            raise EngineError(self._says(name, error))
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)

    def _says(self, name: str, error: Any) -> str:
        kind = error.name
        if kind in _NO_DRIVER:
            return (
                f"CUDA: received {kind} from {name}. Expected an NVIDIA GPU with its driver: this "
                "bundle's engines run on nothing else; build with --backend onnxruntime for this "
                "machine."
            )
        _, text = self.api.cudaGetErrorString(error)
        said = text.decode() if isinstance(text, bytes) else str(text)
        return f"CUDA: {name}: received {kind} ({said}). Expected success."

    def gpu(self, index: int = 0) -> Gpu:
        """Make this device current. Raises EngineError where there is none."""
        count = self.call("cudaGetDeviceCount")
        if index >= count:
            raise EngineError(f"CUDA: received device {index}. Expected one of {count}.")
        self.call("cudaSetDevice", index)
        found = self.call("cudaGetDeviceProperties", index)
        name = found.name.decode() if isinstance(found.name, bytes) else str(found.name)
        return Gpu(
            index=index,
            name=name.rstrip("\0"),
            compute_capability=10 * int(found.major) + int(found.minor),
        )

    def free_bytes(self) -> int:
        free, _ = self.call("cudaMemGetInfo")
        return int(free)
