"""Kernels that TensorRT-RTX compiled for this GPU, kept on disk from one start to the next.

A plan of TensorRT-RTX holds its kernels as text. They are compiled when a context meets a shape,
by every process anew unless it is given what an earlier one compiled. The library itself decides
whether what it is given was compiled for this GPU, driver and version, and ignores what wasn't.

They lie in the folder that the environment's OUTRIDER_KERNELS names, or in ~/.cache/outrider.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

VARIABLE = "OUTRIDER_KERNELS"
_USUAL = Path("~/.cache/outrider/kernels")


class KernelFolder:
    """One that can't be read or written costs time at each start, nothing else."""

    def __init__(self) -> None:
        self._path = _folder()

    def read(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes() if self._path else None
        except OSError:
            return None

    def write(self, name: str, data: memoryview) -> None:
        if self._path is None:
            return
        try:
            _replace(self._path / name, data)
        except OSError as error:
            logger.warning(
                "%s: received %s. Expected to keep compiled kernels there: every start compiles "
                "them anew; name a folder in %s.", self._path, error.strerror or error, VARIABLE,
            )  # fmt: skip
            self._path = None


class KernelCache:
    """Of one engine. `name`: of its file, which need not be there; it tells plans apart."""

    def __init__(self, folder: KernelFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._cache: Any = None
        self._kept_bytes = 0

    def give(self, config: Any) -> None:
        """Let the contexts of an `IRuntimeConfig` take kernels from here, and leave theirs."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._read()
        config.set_runtime_cache(self._cache)

    def keep(self) -> None:
        """Write what was compiled since; a process that ends meanwhile leaves the old file."""
        blob = None if self._cache is None else self._cache.serialize()
        if blob is None:
            return
        data = memoryview(blob)
        if data.nbytes != self._kept_bytes:
            self._folder.write(self._name, data)
            self._kept_bytes = data.nbytes

    def _read(self) -> None:
        kept = self._folder.read(self._name)
        if kept is None:
            return
        if self._cache.deserialize(kept):
            self._kept_bytes = len(kept)
        else:
            logger.info("%s: compiled for another GPU, driver or version", self._name)


def _folder() -> Path | None:
    """None where nobody named one and this user has no home."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    try:
        return _USUAL.expanduser()
    except RuntimeError:
        return None


def _replace(path: Path, data: memoryview) -> None:
    """The old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
