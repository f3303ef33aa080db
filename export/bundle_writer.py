"""Write a bundle beside its final name and move it into place whole.

Invariant: the final name either does not exist or is a finished bundle. Everything is written into
`.<name>.partial-<pid>`, which holds no manifest until all else is on disk, and is then renamed. A
build that fails removes it; what a killed build leaves behind, the next build to that name removes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from runtime.bundle_files import MANIFEST, PARTIAL, record_files
from runtime.errors import BuildError, BundleError
from runtime.manifest import FileRecord, Manifest

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


class BundleWriter:
    """
    with BundleWriter(out) as writer:
        …                               # write files below writer.directory
        writer.finish(make_manifest)    # files' records → Manifest
    """

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out).absolute()
        self.directory = self.out.parent / f"{_prefix(self.out)}{os.getpid()}"
        self._lock: int | None = None
        self._restore: Callable[[], None] = _nothing
        self._finished = False

    def __enter__(self) -> Self:
        """Raises BuildError where the output exists or its place cannot be written."""
        self.refuse_existing()
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.out)
            self.directory.mkdir()
        except OSError as error:
            raise BuildError(
                f"--out {self.out}: received {error.strerror or error}. Expected a place that can "
                "be written; choose another."
            ) from error
        self._lock = _lock(self.directory)
        self._restore = _raise_on_terminate()
        return self

    def finish(self, make_manifest: Callable[[dict[str, FileRecord]], Manifest]) -> Path:
        """Hash the files, write the manifest last, and move the bundle into place.

        make_manifest: records of all files but reports/ and the manifest itself → the manifest.
        Returns the bundle's path. Raises BuildError.
        """
        try:
            records = record_files(self.directory)
        except BundleError as error:
            raise BuildError(f"bundle: {error}") from error
        text = make_manifest(records).to_json()
        _sync_tree(self.directory)
        (self.directory / MANIFEST).write_text(text, encoding="utf-8")
        _sync(self.directory / MANIFEST)
        _sync(self.directory)
        self.refuse_existing()
        self.directory.rename(self.out)
        self._finished = True
        _sync(self.out.parent)
        return self.out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if not self._finished:
            shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        if error is not None and _is_full(error):
            free = shutil.disk_usage(self.out.parent).free
            raise BuildError(
                f"--out {self.out}: received a full disk ({free} bytes free once the unfinished "
                "bundle was removed). Expected room for the whole bundle; free some or choose "
                "another place."
            ) from error
        if error is None and not self._finished:
            raise BuildError(f"--out {self.out}: the bundle was never finished; nothing is left.")

    def refuse_existing(self) -> None:
        """Raises BuildError where the output exists; a build may ask before its slow work."""
        if os.path.lexists(self.out):
            raise BuildError(
                f"--out {self.out}: received a path that exists. Expected a new one: a bundle is "
                "never overwritten; choose another or remove it first."
            )


def _prefix(out: Path) -> str:
    return f".{out.name}{PARTIAL}"


def _remove_leftovers(out: Path) -> None:
    """Directories of builds that are gone: nobody holds their lock."""
    for path in out.parent.glob(f"{_glob_escape(_prefix(out))}*"):
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            os.close(_lock(path))
        except BlockingIOError:
            logger.warning("%s belongs to a build that still runs; left alone", path)
            continue
        logger.info("removing %s, left by an interrupted build", path)
        shutil.rmtree(path)


def _glob_escape(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _lock(directory: Path) -> int:
    """An exclusive lock that ends with the process, however it ends. Raises BlockingIOError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _raise_on_terminate() -> Callable[[], None]:
    """Let SIGTERM unwind the stack, so that the partial bundle goes; returns what undoes this."""
    if threading.current_thread() is not threading.main_thread():
        return _nothing
    before = signal.signal(signal.SIGTERM, _terminate)
    return lambda: _reset(before)


def _reset(before: Any) -> None:
    signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _nothing() -> None:
    return None


def _is_full(error: BaseException) -> bool:
    """A full disk, also where a native library hides it in the text of its own error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if f"os error {errno.ENOSPC}" in str(seen) or os.strerror(errno.ENOSPC) in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _sync_tree(directory: Path) -> None:
    for root, _, names in os.walk(directory):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
