"""One GGUF file: its metadata, and one tensor at a time read from it.

The header is parsed here in one pass over the file: the gguf library's reader builds a NumPy view
for each token and merge (10 s where this takes 0.2) and maps the weights. Blocks are dequantized by
the library. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from runtime.errors import CheckpointError

from .tensor_store import read_exactly

_VERSIONS = (2, 3)
_SCALARS = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), ("<" + c for c in "BbHhIif?Qqd"), strict=True)
)
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # where the metadata states none


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies; `shape` in NumPy's order, slowest axis first."""

    path: Path
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int

    def load(self) -> np.ndarray:
        """Dequantized to float32. Raises CheckpointError for a type that gguf cannot read."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        rows = (*self.shape[:-1], self.shape[-1] // block * block_bytes)
        raw = read_exactly(self.path, self.offset, self.nbytes).reshape(rows)
        try:
            return np.asarray(dequantize(raw, self.kind)).reshape(self.shape)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: {self.name}: received type {self.kind.name}. Expected a type that "
                "the gguf library dequantizes; use another quantization of the model."
            ) from error


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table. Raises CheckpointError where the file is foreign or truncated."""
    try:
        with path.open("rb") as file:
            return _Header(path, file).read()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: received no such file. Expected a GGUF file; check the path."
        ) from error
    except (struct.error, UnicodeDecodeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: received {path.stat().st_size} bytes that are not a whole GGUF file "
            f"({error}). Expected GGUF version 2 or 3, little-endian; the file is truncated or "
            "foreign: download it again."
        ) from error


class _Header:
    """The cursor over a header; raises the plain errors that `read_gguf` explains."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = path.stat().st_size

    def read(self) -> GgufFile:
        if self.file.read(4) != b"GGUF":
            raise ValueError("no GGUF magic")
        version, tensor_count, key_count = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}")
        metadata = {self._string(): self._value() for _ in range(key_count)}
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", _ALIGNMENT))
        start = -(-self.file.tell() // alignment) * alignment
        tensors = {entry[0]: self._tensor(start, *entry) for entry in entries}
        return GgufFile(path=self.path, metadata=metadata, tensors=tensors)

    def _tensor(
        self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        tensor = GgufTensor(
            path=self.path,
            name=name,
            kind=GGMLQuantizationType(kind),
            shape=shape,
            offset=start + offset,
            nbytes=math.prod(shape) // block * block_bytes,
        )
        if shape and shape[-1] % block:
            raise ValueError(f"{name}: {shape[-1]} values a row are no whole blocks of {block}")
        if tensor.offset + tensor.nbytes > self.size:
            raise ValueError(f"{name} ends at byte {tensor.offset + tensor.nbytes}")
        return tensor

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (axes,) = self._unpack("<I")
        dims = self._unpack(f"<{self._count(axes)}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(dims)), kind, offset

    def _value(self) -> Any:
        (kind,) = self._unpack("<I")
        return self._of_kind(kind)

    def _of_kind(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        item, count = self._unpack("<IQ")
        count = self._count(count)
        if item in _SCALARS:
            return list(self._unpack(f"<{count}{_SCALARS[item][1]}"))
        return [self._of_kind(item) for _ in range(count)]

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        raw = self.file.read(self._count(length))
        if len(raw) != length:
            raise ValueError(f"the header ends at byte {self.size}")
        return raw.decode("utf-8")

    def _count(self, count: int) -> int:
        """A count that the file can hold at all: damage must not become an allocation."""
        if count > self.size:
            raise ValueError(f"a count of {count}")
        return count

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.file.read(struct.calcsize(form)))
