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
        self._interruptions = _Interruptions()
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
        self._interruptions.install()
        return self

    def finish(self, make_manifest: Callable[[dict[str, FileRecord]], Manifest]) -> Path:
        """Hash the files, write the manifest last, and move the bundle into place.

        make_manifest: records of all files but reports/ and the manifest itself → the manifest.
        Returns the bundle's path. Raises BuildError, and what a signal that came earlier raises.
        """
        self._interruptions.raise_received()
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
        self._interruptions.raise_received()
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
        self._interruptions.restore()
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


class _Interruptions:
    """Lets SIGTERM and SIGINT unwind the stack, and remembers them.

    A library that swallows the exception, as callbacks from native code do, only delays the end: a
    bundle that was told to end is never finished. A signal that is ignored stays ignored.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._received: int | None = None

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()

    def raise_received(self) -> None:
        """Raises KeyboardInterrupt or SystemExit where a signal came."""
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is not None:
            raise SystemExit(128 + self._received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self.raise_received()


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
