"""A GGUF file as a checkpoint: Hugging Face's names, layouts and text files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from runtime.bundle_files import file_sha256
from runtime.errors import CheckpointError, UnsupportedModel

from .checkpoint import Checkpoint
from .eager import build_eager
from .gguf_config import gguf_config
from .gguf_file import GgufFile, read_gguf
from .gguf_tokenizer import end_token_ids, gguf_tokenizer
from .names import shorten
from .special_tokens import merge_special_tokens
from .text_files import TextFiles

_ROOT = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class GgufStore:
    """The tensors of one file under Hugging Face's names."""

    file: GgufFile
    found: dict[str, str]  # Hugging Face's name → the file's
    head_counts: dict[str, int]  # the file's projections whose rows RoPE permuted → heads

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self._find(name)].shape

    def dtype(self, name: str) -> str:
        return str(self.file.tensors[self._find(name)].kind.name)

    def load(self, name: str) -> np.ndarray:
        key = self._find(name)
        weights = self.file.tensors[key].load()
        heads = self.head_counts.get(key)
        return weights if heads is None else unpermute(weights, heads)

    def sha256(self) -> str:
        return self._sha256

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.found)

    @cached_property
    def _sha256(self) -> str:
        return file_sha256(self.file.path)

    def _find(self, name: str) -> str:
        if name not in self.found:
            raise CheckpointError(
                f"{self.file.path.name}: received no tensor {name!r}. Expected it in the file; it "
                "is incomplete or of another model."
            )
        return self.found[name]


def unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of Q and K, which pairs rotary dimensions (2i, 2i + 1).

    weights: [heads * head_dim, …]; transformers pairs (i, i + head_dim / 2).
    """
    half = weights.shape[0] // heads // 2
    pairs = weights.reshape(heads, half, 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)


def open_gguf(path: Path) -> Checkpoint:
    """Raises CheckpointError, or UnsupportedModel for what Outrider does not carry."""
    file = read_gguf(path)
    config = gguf_config(file)
    metadata = file.metadata
    stated = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(metadata),
    }
    return Checkpoint(
        name=path.name,
        revision="",
        config=config,
        tensors=GgufStore(file, _map_names(file), _head_counts(file, config)),
        tokens=merge_special_tokens([stated], config.vocab_size),
        read_text=partial(_read_text, file),
        read_model=build_eager,
    )


def _map_names(file: GgufFile) -> dict[str, str]:
    found = {_hugging_face_name(name): name for name in file.tensors}
    unknown = [name for name in file.tensors if _hugging_face_name(name) is None]
    if unknown:
        raise UnsupportedModel(
            f"{file.path.name}: received tensors {shorten(unknown)}. Expected those of a plain "
            f"{file.metadata['general.architecture']} decoder; use the safetensors checkpoint."
        )
    return {name: key for name, key in found.items() if name is not None}


def _hugging_face_name(name: str) -> str | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, suffix = match.groups()
    if layer is None:
        return f"{_ROOT[part]}.{suffix}" if part in _ROOT else None
    return f"model.layers.{layer}.{_LAYER[part]}.{suffix}" if part in _LAYER else None


def _head_counts(file: GgufFile, config: PretrainedConfig) -> dict[str, int]:
    """Only files of architecture `llama` are permuted."""
    if file.metadata["general.architecture"] != "llama":
        return {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return {n: heads[p] for n in file.tensors for p in heads if f".{p}." in n}


def _read_text(file: GgufFile) -> TextFiles:
    return TextFiles(
        tokenizer=gguf_tokenizer(file.metadata, file.path),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        generation_config={},
    )
