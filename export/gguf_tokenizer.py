"""The tokenizer of a GGUF model, rebuilt for the tokenizers library.

`tokenizer.ggml.pre` names how text is split before the merges; a wrong split still reads well and
encodes differently. So only splits that are known are built, and any other name is refused.
Definitions: llama.cpp, `src/llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from runtime.errors import CheckpointError, UnsupportedModel

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

_GPT2 = ("gpt-2", "mpt", "olmo")
_DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact", "codeshell", "exaone")
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
}
_CONTROL, _USER_DEFINED = 3, 4

# Tokens that llama.cpp takes for the end of generation by their text, besides the stated ones.
_END_TEXTS = frozenset(
    f"<|{name}|>" for name in ("eot_id", "eom_id", "im_end", "end", "endoftext", "end_of_text")
)


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Raises UnsupportedModel for an unknown tokenizer or split, CheckpointError if lost."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModel(
            f"{path.name}: received tokenizer {model!r}. Expected 'gpt2' (byte-level BPE); use the "
            "model's Hugging Face checkpoint."
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
    merges = [_pair(merge) for merge in _strings(metadata, "tokenizer.ggml.merges", path)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(
            f"{path.name}: received {len(tokens) - len(vocabulary)} tokens twice. Expected each "
            "once; convert the model again."
        )
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(str(metadata.get("tokenizer.ggml.pre")), path)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens)
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    return tokenizer


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The stated end tokens (eos, eot, eom), and control tokens that end by their text."""
    stated = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    by_text = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_TEXTS
    ]
    return [token for token in stated if token is not None] + by_text


def _pre_tokenizer(name: str, path: Path) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _GPT2:
        return gpt2
    if name in _DIGITS_THEN_GPT2:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, plain])
    known = ", ".join(sorted({*_GPT2, *_DIGITS_THEN_GPT2, *_SPLITS}))
    raise UnsupportedModel(
        f"{path.name}: received tokenizer.ggml.pre {name!r}. Expected one of {known}; use the "
        "model's Hugging Face checkpoint."
    )


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str]) -> processors.PostProcessor:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", False) or bos is None:
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(
        single=f"{tokens[bos]}:0 $A:0",
        pair=f"{tokens[bos]}:0 $A:0 {tokens[bos]}:1 $B:1",
        special_tokens=[(tokens[bos], bos)],
    )


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control and user-defined tokens are matched whole, before the text is split."""
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _strings(metadata: Mapping[str, Any], key: str, path: Path) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise CheckpointError(
            f"{path.name}: received no {key}. Expected the vocabulary inside the file; convert the "
            "model again, with its tokenizer."
        )
    return value
