"""Tiny real checkpoints for tests: random weights and a byte-level tokenizer in real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

VOCAB = 300
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "Ġ"), ("a", "n"), ("an", "d")]


def llama_config(**changes: Any) -> LlamaConfig:
    """Two layers, one KV head for two query heads; untied unless asked."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    return LlamaConfig(**values | changes)


def tokens() -> list[str]:
    """256 bytes, two special tokens, the merges, then padding tokens up to VOCAB - 20."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [left + right for left, right in MERGES]
    known = [*alphabet, "<|begin|>", "<|im_end|>", *merged]
    return known + [f"<pad{i}>" for i in range(VOCAB - 20 - len(known))]


def tokenizer(names: list[str] | None = None) -> Tokenizer:
    vocabulary = {name: i for i, name in enumerate(names or tokens())}
    made = Tokenizer(BPE(vocab=vocabulary, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [AddedToken(t, normalized=False, special=True) for t in ("<|begin|>", "<|im_end|>")]
    made.add_special_tokens([t for t in special if t.content in vocabulary])
    return made


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save(
    directory: Path, config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, **options: Any
) -> PreTrainedModel:
    """Save a random model with a tokenizer; returns the model as saved."""
    model = random_model(config).to(dtype)
    model.save_pretrained(directory, **options)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|begin|>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))
