"""Weights in a pickled file of torch (`.bin`, `.pt`), as many published heads still are.

A pickle can run code. It is only ever opened by torch's restricted reader, which builds tensors
and nothing else, and mapped rather than read.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from runtime.bundle_files import file_sha256
from runtime.errors import CheckpointError


@dataclass(frozen=True)
class PickledStore:
    """The tensors of one pickled file, mapped; one is copied when it is asked for."""

    path: Path
    tensors: dict[str, torch.Tensor]

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name).shape)

    def dtype(self, name: str) -> str:
        return str(self._find(name).dtype).removeprefix("torch.")

    def load(self, name: str) -> np.ndarray:
        tensor = self._find(name)
        wide = tensor.float() if tensor.is_floating_point() else tensor
        return np.array(wide.numpy())

    def sha256(self) -> str:
        """Of the digests of config.json and the file."""
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        total = hashlib.sha256()
        for path in (self.path.parent / "config.json", self.path):
            total.update(f"{path.name}\0{file_sha256(path)}\n".encode())
        return total.hexdigest()

    def _find(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.path}: received no tensor {name!r}. Expected it in the file; it is "
                "incomplete or of another head."
            )
        return self.tensors[name]


def read_pickled(path: Path) -> PickledStore:
    """Map a file of named tensors. Raises CheckpointError for anything else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path}: received a file that torch's restricted reader refuses "
            f"({(str(error).strip() or type(error).__name__).splitlines()[0]}). Expected a mapping "
            "of names to tensors as torch.save writes it; download it again, or save the weights "
            "as safetensors."
        ) from error
    _check_state(path, state)
    return PickledStore(path, state)


def _check_state(path: Path, state: object) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: received {type(state).__name__}. Expected a mapping of names to tensors; "
            "save the head's state dict."
        )
    foreign = sorted(str(k) for k, v in state.items() if not isinstance(v, torch.Tensor))
    if foreign:
        raise CheckpointError(
            f"{path}: received {foreign[0]!r}, which is no tensor. Expected a mapping of names to "
            "tensors; save the head's state dict alone."
        )
