"""The directory of a drafter's head: its config.json as it stands, and its weights by file name.

A head is no model of transformers, so AutoConfig can't read it, and what config.json calls it
isn't always true: many an EAGLE head says `LlamaForCausalLM`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import CheckpointError

from .checkpoint import Checkpoint
from .hub import download
from .model_config import read_json
from .pickled_weights import PickledStore, read_pickled
from .safetensors_checkpoint import SafetensorsStore, read_headers
from .safetensors_file import read_header
from .tensor_store import TensorStore
from .text_files import read_tokenizer
from .vocabulary import check_vocabularies

logger = logging.getLogger(__name__)

_MODEL_FILES = ("model.safetensors", "model.safetensors.index.json")
_HEAD_FILE = "medusa_lm_head.safetensors"
_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")


@dataclass(frozen=True, kw_only=True)
class HeadFiles:
    name: str  # directory name or hub id
    revision: str  # hub commit, "" for local files
    directory: Path
    config: Mapping[str, Any]
    tensors: TensorStore

    def warn_of_pickle(self) -> None:
        """A pickled file is read, but safetensors would have been better."""
        if isinstance(self.tensors, PickledStore):
            logger.warning(
                "%s: %s is a pickle. It was read without running any code of it; "
                "safetensors.torch.save_file(torch.load(path, weights_only=True), "
                "'model.safetensors') saves it as what needs no such care.",
                self.name,
                self.tensors.path.name,
            )

    def check_target(self, target: Checkpoint, stated: str | None) -> None:
        """Compare what a head may say of its target: a tokenizer, and the name `stated`.

        Another name is only warned of, for a directory can have any. Raises VocabularyMismatch.
        """
        if (self.directory / "tokenizer.json").exists():
            size = target.config.vocab_size
            own = read_tokenizer(self.directory)
            check_vocabularies(
                target.text_files().tokenizer, own, target_size=size, draft_size=size
            )
        if stated and _base_name(stated) != _base_name(target.name):
            logger.warning(
                "%s: made for %s; the target here is %s. If they are different models, little or "
                "nothing will be accepted.",
                self.name, stated, target.name,
            )  # fmt: skip


def open_head_files(source: str | Path) -> HeadFiles:
    """Open a directory or a hub id. Raises CheckpointError."""
    directory = head_directory(source)
    local = Path(source).is_dir()
    return HeadFiles(
        name=directory.resolve().name if local else str(source),
        revision="" if local else directory.name,
        directory=directory,
        config=read_json(directory / "config.json"),
        tensors=read_weights(directory),
    )


def head_directory(source: str | Path) -> Path:
    """The directory, or the hub's snapshot; pickled files only where it has no safetensors."""
    if Path(source).is_dir():
        return Path(source)
    directory = download(str(source), None)
    if any(directory.glob("*.safetensors")):
        return directory
    return download(str(source), directory.name, patterns=_PICKLED)


def _base_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def read_weights(directory: Path) -> TensorStore:
    """The tensors of a directory, none of them read. Raises CheckpointError."""
    if any((directory / name).exists() for name in _MODEL_FILES):
        return SafetensorsStore(directory, read_headers(directory))
    if (directory / _HEAD_FILE).exists():
        return SafetensorsStore(directory, read_header(directory / _HEAD_FILE))
    for name in _PICKLED:
        if (directory / name).exists():
            return read_pickled(directory / name)
    received = sorted(p.name for p in directory.iterdir() if p.suffix != ".json") or "no weights"
    raise CheckpointError(
        f"{directory}: received {received}. Expected {_MODEL_FILES[0]}, {_HEAD_FILE}, "
        f"{_PICKLED[0]} or {_PICKLED[1]}; download the head again."
    )
