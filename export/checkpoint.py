"""A checkpoint that is open but not held: names, shapes, and one tensor at a time.

    open_checkpoint("path/or/hub-id/or/file.gguf") → Checkpoint

Parameters carry the names of transformers' state dict, whatever the file calls them; a name that
is tied to another resolves to the tensor that is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig, PreTrainedModel

from runtime.errors import CheckpointError

from .model_config import model_class, tied_names
from .special_tokens import SpecialTokens
from .tensor_store import TensorStore
from .text_files import TextFiles


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    name: str  # directory name, hub id or file name
    revision: str  # hub commit, "" for local files
    config: PretrainedConfig
    tensors: TensorStore
    tokens: SpecialTokens
    read_text: Callable[[], TextFiles] = field(repr=False)
    read_model: Callable[[Checkpoint], PreTrainedModel] = field(repr=False)

    def names(self) -> frozenset[str]:
        """Stored parameters and those tied to them."""
        return self.tensors.names() | self._ties().keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(self.stored(name))

    def dtype(self, name: str) -> str:
        """As stored: `float32`, `bfloat16`, `Q4_1`, …"""
        return self.tensors.dtype(self.stored(name))

    def load(self, name: str) -> np.ndarray:
        """One tensor, float32 where it is floating; the array belongs to the caller.

        Raises CheckpointError for a name that the checkpoint lacks.
        """
        return self.tensors.load(self.stored(name))

    def sha256(self) -> str:
        """Digest of configuration and weights; of a GGUF, the digest of the file."""
        return self.tensors.sha256()

    @property
    def parameters(self) -> int:
        """How many, tied ones counted once."""
        return sum(math.prod(self.tensors.shape(name)) for name in self.tensors.names())

    def special_tokens(self) -> SpecialTokens:
        return self.tokens

    def text_files(self) -> TextFiles:
        """Tokenizer, chat template and generation config. Raises CheckpointError if missing."""
        return self.read_text()

    def save_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json, chat_template.jinja (if any) and generation_config.json."""
        self.text_files().save(directory, self.tokens)

    def load_eager(self) -> PreTrainedModel:
        """The whole model in float32, for evaluation: what the parity gate compares with."""
        return self.read_model(self).eval().requires_grad_(False)

    def eager_bytes(self) -> int:
        """Memory that `load_eager` needs: float32 weights, and the largest tensor once more."""
        sizes = [4 * math.prod(self.tensors.shape(name)) for name in self.tensors.names()]
        return sum(sizes) + max(sizes, default=0)

    def find(self, name: str) -> str | None:
        """`name`'s tensor, its base prefix (`model.`, `transformer.`) added or removed, or None."""
        return find_name(name, self.tensors.names() | self._ties().keys(), self._prefix())

    def _prefix(self) -> str:
        kind = model_class(self.config)
        return f"{kind.base_model_prefix}." if kind is not None else "model."

    def _ties(self) -> dict[str, str]:
        """Tied names that are not stored → the stored one; either side may be the stored one."""
        stored, prefix, ties = self.tensors.names(), self._prefix(), {}
        for name, source in tied_names(self.config).items():
            own, other = find_name(name, stored, prefix), find_name(source, stored, prefix)
            if own is None and other is not None:
                ties[name] = other
            elif own is not None and other is None:
                ties[source] = own
        return ties

    def stored(self, name: str) -> str:
        """The name under which the files hold `name`. Raises CheckpointError where they do not."""
        if name in self.tensors.names():
            return name
        ties = self._ties()
        if name in ties:
            return ties[name]
        raise CheckpointError(
            f"{self.name}: received no tensor {name!r}. Expected it for a {self.config.model_type} "
            "model; the checkpoint is incomplete or of another model."
        )


def find_name(name: str, available: Collection[str], prefix: str) -> str | None:
    """`name` as it stands, or with the base prefix added or removed; None where there is none."""
    for candidate in (name, name.removeprefix(prefix), prefix + name):
        if candidate in available:
            return candidate
    return None


def open_checkpoint(source: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a Hugging Face directory, a hub id (HF_HUB_OFFLINE is honoured) or a `.gguf` file.

    Raises CheckpointError, or UnsupportedModel for what Outrider does not carry.
    """
    from .gguf_checkpoint import open_gguf
    from .hub import download
    from .safetensors_checkpoint import open_directory

    path = Path(source)
    if path.suffix == ".gguf":
        return open_gguf(path)
    if path.is_dir():
        return open_directory(path, name=path.resolve().name, revision="")
    directory = download(str(source), revision)
    return open_directory(directory, name=str(source), revision=directory.name)
