"""A Hugging Face directory with safetensors weights, whole or in shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from runtime.bundle_files import file_sha256
from runtime.errors import CheckpointError

from .checkpoint import Checkpoint
from .model_config import load_config, read_json
from .names import shorten
from .safetensors_file import StoredTensor, read_header
from .special_tokens import SpecialTokens, merge_special_tokens
from .text_files import TextFiles, read_chat_template, read_optional_json, read_tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class SafetensorsStore:
    """The weights of one directory, by the names that its files give them."""

    directory: Path
    stored: dict[str, StoredTensor]

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        return self._find(name).dtype

    def load(self, name: str) -> np.ndarray:
        return self._find(name).load()

    def sha256(self) -> str:
        """Of the digests of config.json and the weight files, by name."""
        return self._sha256

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.stored)

    @cached_property
    def _sha256(self) -> str:
        files = {tensor.path for tensor in self.stored.values()}
        total = hashlib.sha256()
        for path in [self.directory / "config.json", *sorted(files)]:
            total.update(f"{path.name}\0{file_sha256(path)}\n".encode())
        return total.hexdigest()

    def _find(self, name: str) -> StoredTensor:
        if name not in self.stored:
            raise CheckpointError(
                f"{self.directory}: received no tensor {name!r}. Expected it in the checkpoint; it "
                "is incomplete or of another model."
            )
        return self.stored[name]


def open_directory(directory: Path, *, name: str, revision: str) -> Checkpoint:
    """Raises CheckpointError, or UnsupportedModel for what Outrider does not carry."""
    config = load_config(directory)
    return Checkpoint(
        name=name,
        revision=revision,
        config=config,
        tensors=SafetensorsStore(directory, read_headers(directory)),
        tokens=_special_tokens(directory, config.vocab_size),
        read_text=partial(_read_text, directory),
        read_model=partial(_read_model, directory),
    )


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory's one file or of its shards, none of them read."""
    if (directory / _INDEX).exists():
        return _read_shards(directory)
    if (directory / _SINGLE).exists():
        return read_header(directory / _SINGLE)
    received = sorted(p.name for p in directory.glob("*.bin")) or "no weights"
    raise CheckpointError(
        f"{directory}: received {received}. Expected {_SINGLE} or {_INDEX}; convert with "
        "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)."
    )


def _read_shards(directory: Path) -> dict[str, StoredTensor]:
    where = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(
            f"{directory / _INDEX}: received no weight_map. Expected tensor names with their "
            "shards; download it again."
        )
    shards = set(where.values())
    foreign = sorted(s for s in shards if Path(s).name != s)
    missing = sorted(s for s in shards - set(foreign) if not (directory / s).exists())
    if foreign or missing:
        raise CheckpointError(
            f"{directory}: received an index of {len(shards)} shards, of which {missing} are "
            f"missing and {foreign} lie outside. Expected all shards in the directory; download "
            "them again."
        )
    stored = {n: t for shard in sorted(shards) for n, t in read_header(directory / shard).items()}
    lost = sorted(set(where) - set(stored))
    if lost:
        raise CheckpointError(
            f"{directory}: the index names tensors that no shard has: {shorten(lost)}. Expected "
            "shards and index of one model; download them again."
        )
    return stored


def _read_text(directory: Path) -> TextFiles:
    return TextFiles(
        tokenizer=read_tokenizer(directory),
        chat_template=read_chat_template(directory),
        generation_config=read_optional_json(directory / "generation_config.json"),
    )


def _special_tokens(directory: Path, vocab_size: int) -> SpecialTokens:
    """From the tokenizer, generation_config.json and config.json.

    config.json is read raw: the defaults of a configuration class are not the model's word.
    """
    return merge_special_tokens(
        [
            _tokenizer_ids(directory),
            read_optional_json(directory / "generation_config.json"),
            read_json(directory / "config.json"),
        ],
        vocab_size,
    )


def _tokenizer_ids(directory: Path) -> dict[str, Any]:
    stated = read_optional_json(directory / "special_tokens_map.json")
    stated |= read_optional_json(directory / "tokenizer_config.json")
    tokens = {key: stated.get(key) for key in ("bos_token", "eos_token")}
    if not any(tokens.values()) or not (directory / "tokenizer.json").exists():
        return {}
    tokenizer = read_tokenizer(directory)
    return {
        f"{key}_id": tokenizer.token_to_id(t["content"] if isinstance(t, dict) else t)
        for key, t in tokens.items()
        if t is not None
    }


def _read_model(directory: Path, checkpoint: Checkpoint) -> PreTrainedModel:
    with _no_progress_bar():
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers' own, among lines that tell what a build does."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
