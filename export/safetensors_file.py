"""One safetensors file: its header, and one tensor at a time read from it.

The safetensors library checks the header; the bytes are read here, because its numpy side has no
bfloat16 and its maps keep every page resident that was ever touched.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from runtime.errors import CheckpointError

from .tensor_store import read_exactly

# safetensors' name → (numpy type that holds it, name that is shown)
_DTYPES = {
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "BOOL": ("?", "bool"),
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies."""

    path: Path
    name: str
    kind: str  # safetensors' dtype name
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int

    @property
    def dtype(self) -> str:
        return _DTYPES[self.kind][1] if self.kind in _DTYPES else self.kind

    def load(self) -> np.ndarray:
        """float32 for a floating tensor, otherwise as stored. Raises CheckpointError."""
        if self.kind not in _DTYPES:
            raise CheckpointError(
                f"{self.path}: {self.name}: received type {self.kind}. Expected one of "
                f"{sorted(_DTYPES)}; use a checkpoint that is not quantized."
            )
        raw = read_exactly(self.path, self.offset, self.nbytes).view(_DTYPES[self.kind][0])
        return _upcast(raw, self.kind).reshape(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, none of them read.

    Raises CheckpointError where the file is no safetensors file, or is truncated.
    """
    _check_header(path)
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    start = 8 + header_bytes
    return {
        name: StoredTensor(
            path=path,
            name=name,
            kind=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=start + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _check_header(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: received no such file. Expected a shard of the checkpoint; download it again."
        ) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: received {_size(path)} bytes that are no whole safetensors file ({error}). "
            "Expected a file as its header describes it; it is truncated or foreign: download it "
            "again."
        ) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _upcast(raw: np.ndarray, kind: str) -> np.ndarray:
    if kind == "BF16":  # the upper half of a float32
        wide = np.zeros(raw.size, dtype="<f4")
        wide.view("<u2")[1::2] = raw
        return wide
    return raw.astype(np.float32, copy=False) if kind.startswith("F") else raw
