"""The files of a bundle against its manifest: none missing, none more, none changed.

The directory is walked without following links, and a link anywhere in it is refused: whatever a
bundle's paths say, nothing outside of it is read.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from .errors import BundleError
from .manifest import FileRecord

MANIFEST = "manifest.json"
REPORTS = "reports"
PARTIAL = ".partial-"  # `.<name>.partial-<pid>` is a build that did not finish


def check_files(path: Path, records: Mapping[str, FileRecord]) -> None:
    """Names and sizes. Raises BundleError naming the file."""
    for name in records:
        _check_name(name)
    found = {name: size for name, size in walk(path) if covered(name)}
    missing, extra = sorted(records.keys() - found), sorted(found.keys() - records)
    if missing or extra:
        raise BundleError(
            f"{path}: files missing {missing}, files that the manifest does not list {extra}. "
            "Expected exactly the files of the build; copy the bundle again or rebuild it."
        )
    for name, record in records.items():
        if found[name] != record.bytes:
            raise BundleError(
                f"{name}: received {found[name]} bytes. Expected {record.bytes}; the file is "
                "truncated or changed: copy the bundle again or rebuild it."
            )


def verify_digests(path: Path, records: Mapping[str, FileRecord]) -> None:
    """Contents. Raises BundleError naming the file."""
    for name, record in records.items():
        received = file_sha256(path / name)
        if received != record.sha256:
            raise BundleError(
                f"{name}: received sha256 {received}. Expected {record.sha256}; the file is "
                "damaged or changed: copy the bundle again or rebuild it."
            )


def record_files(path: Path) -> dict[str, FileRecord]:
    """What the manifest will say of a finished directory."""
    return {
        name: FileRecord(sha256=file_sha256(path / name), bytes=size)
        for name, size in sorted(walk(path))
        if covered(name)
    }


def covered(name: str) -> bool:
    """Whether the manifest lists this file: all but itself and the reports."""
    return name != MANIFEST and not name.startswith(f"{REPORTS}/")


def walk(path: Path, inside: str = "") -> Iterator[tuple[str, int]]:
    """Relative POSIX paths and sizes of all files; a link or a device raises BundleError."""
    with os.scandir(path / inside) as entries:
        for entry in entries:
            name = f"{inside}/{entry.name}" if inside else entry.name
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                yield from walk(path, name)
            elif stat.S_ISREG(status.st_mode):
                yield name, status.st_size
            else:
                raise BundleError(
                    f"{name}: received a link or a special file. Expected plain files only; copy "
                    "the bundle with its links resolved, or rebuild it."
                )


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_name(name: str) -> None:
    pure = PurePosixPath(name)
    plain = str(pure) == name and pure.name and not pure.is_absolute() and ".." not in pure.parts
    if not plain or "\\" in name or "\0" in name or not covered(name):
        raise BundleError(
            f"manifest.json: received the file name {name!r}. Expected a plain path inside the "
            "bundle; rebuild the bundle."
        )
