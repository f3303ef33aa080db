"""Where a checkpoint's tensors come from: one tensor at a time, never the whole model.

Every source (safetensors files, a GGUF file, a draft that borrows its target's embedding) answers
the same few questions, so the rest of the exporter does not know which one it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from runtime.errors import CheckpointError


class TensorStore(Protocol):
    """Named tensors on disk. Unknown names raise CheckpointError."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """As stored: a numpy name, `bfloat16` or a GGUF type such as `Q4_1`."""
        ...

    def load(self, name: str) -> np.ndarray:
        """The tensor as an array of its own: float32, or integers and bools as stored."""
        ...

    def sha256(self) -> str:
        """Digest of the configuration and the weights, read in chunks."""
        ...


@dataclass(frozen=True, kw_only=True)
class RenamedStore:
    """Some of a store's tensors, under other names."""

    own: TensorStore
    stored: Mapping[str, str]  # name here → name in `own`

    def names(self) -> frozenset[str]:
        return frozenset(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.own.shape(self.stored.get(name, name))

    def dtype(self, name: str) -> str:
        return self.own.dtype(self.stored.get(name, name))

    def load(self, name: str) -> np.ndarray:
        return self.own.load(self.stored.get(name, name))

    def sha256(self) -> str:
        return self.own.sha256()


@dataclass(frozen=True, kw_only=True)
class BorrowingStore:
    """A store in which some names resolve to another store's tensors."""

    own: TensorStore
    lender: TensorStore
    borrowed: Mapping[str, str]  # name here → name at the lender
    hidden: frozenset[str] = frozenset()  # names of `own` that are not parameters

    def names(self) -> frozenset[str]:
        return (self.own.names() - self.hidden) | self.borrowed.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        store, key = self._resolve(name)
        return store.shape(key)

    def dtype(self, name: str) -> str:
        store, key = self._resolve(name)
        return store.dtype(key)

    def load(self, name: str) -> np.ndarray:
        store, key = self._resolve(name)
        return store.load(key)

    def sha256(self) -> str:
        """Of the own part; the lender has its own digest."""
        return self.own.sha256()

    def _resolve(self, name: str) -> tuple[TensorStore, str]:
        if name in self.borrowed:
            return self.lender, self.borrowed[name]
        return self.own, name


def load_finite(tensors: TensorStore, name: str, where: str) -> np.ndarray:
    """One tensor of `where`, a drafter's head.

    Raises CheckpointError where a value isn't finite: it was never trained, or overflowed when it
    was converted. Such a head drafts nothing that is accepted, and says so nowhere.
    """
    value = tensors.load(name)
    if not np.isfinite(value).all():
        raise CheckpointError(
            f"{where}: {name}: received {np.count_nonzero(~np.isfinite(value))} values that "
            f"aren't finite, of {value.size}. Expected numbers; the file is damaged or was saved "
            "before its weights were loaded."
        )
    return value


def read_exactly(path: Path, offset: int, count_bytes: int) -> np.ndarray:
    """`count_bytes` of a file as uint8, read rather than mapped.

    A mapped page counts as resident until the map goes, so a build that walks a mapped file would
    hold the model after all.
    """
    raw = np.fromfile(path, dtype=np.uint8, count=count_bytes, offset=offset)
    if raw.nbytes != count_bytes:
        raise CheckpointError(
            f"{path}: received {raw.nbytes} bytes at offset {offset}. Expected {count_bytes}; the "
            "file is truncated or changed while it was read: download it again."
        )
    return raw
