"""The one place that knows which TensorRT this is: `tensorrt` or `tensorrt-rtx`, one API.

TensorRT keeps the first logger that it is given for the whole process, and ignores every later one.
So there is one logger a package, made here; who builds reads off it what was said meanwhile.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from runtime.errors import BuildError

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_INSTALL = {"tensorrt": "outrider[tensorrt]", "tensorrt-rtx": "outrider[tensorrt-rtx]"}
_LEAST = {"tensorrt": (10, 16), "tensorrt-rtx": (1, 7)}


@dataclass(frozen=True, kw_only=True)
class Library:
    """`api`: the imported module; `logger`: what it warned of since the last `clear`."""

    backend: str
    api: Any
    logger: Any

    @property
    def version(self) -> str:
        return str(self.api.__version__)

    @property
    def portable_builds(self) -> bool:
        """Whether engines are built without the GPU that they are for."""
        return self.backend == "tensorrt-rtx"

    def check_logger(self, builder: Any) -> None:
        """Raises BuildError where warnings would go to someone else's logger."""
        if builder.logger is not self.logger:
            raise BuildError(
                f"{self.backend}: received a process in which other code made the first logger, "
                "which the library keeps. Expected to see its warnings; build in a process of "
                "its own."
            )


@functools.cache
def load(backend: str) -> Library:
    """Raises BuildError for a missing package, or one that is too old."""
    try:
        api = importlib.import_module(MODULES[backend])
    except (ImportError, OSError) as error:
        raise BuildError(
            f"--backend {backend}: received no usable package ({error}). Expected "
            f"{MODULES[backend]}; pip install '{_INSTALL[backend]}'."
        ) from error
    found = tuple(int(part) for part in api.__version__.split(".")[:2])
    if found < _LEAST[backend]:
        least = ".".join(map(str, _LEAST[backend]))
        raise BuildError(
            f"--backend {backend}: received version {api.__version__}. Expected {least} or newer, "
            f"which has TensorScatter; pip install -U '{_INSTALL[backend]}'."
        )
    return Library(backend=backend, api=api, logger=_logger(api))


def _logger(api: Any) -> Any:
    """A class that needs the package to exist."""

    class Logger(api.ILogger):
        def __init__(self) -> None:
            api.ILogger.__init__(self)
            self.warnings: list[str] = []
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= api.ILogger.Severity.ERROR:
                self.errors.append(message)
            elif severity == api.ILogger.Severity.WARNING and _tells(message):
                self.warnings.append(message)

        def clear(self) -> None:
            self.warnings, self.errors = [], []

    return Logger()


def _tells(message: str) -> bool:
    """The runtime binds int64 where a graph says so: no need to be reminded."""
    return "has Int64 binding" not in message
