"""Tiny GGUF files for tests, laid out by the gguf library as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from tiny_checkpoints import MERGES, llama_config, random_model, tokens
from transformers import PretrainedConfig, Qwen2Config, Qwen3Config

HIDDEN, HEADS, KV_HEADS = 64, 4, 2
CONTROL, NORMAL = 3, 1

ROOT = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config(architecture: str, *, tied: bool, head_dim: int) -> PretrainedConfig:
    kinds = {"llama": type(llama_config()), "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    # 128 for qwen3 unless asked: transformers' GGUF reader takes the class's default there
    return kinds[architecture](
        vocab_size=len(tokens()),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=tied,
        **({"head_dim": head_dim} if architecture == "qwen3" else {}),
    )


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As convert_hf_to_gguf.py does to q and k of llama models."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in ROOT:
        return f"{ROOT[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.{suffix}"


def write(
    path: Path,
    architecture: str = "llama",
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tied: bool = False,
    head_dim: int = 128,
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    general_architecture: str | None = None,
) -> dict[str, np.ndarray]:
    """Returns the float weights by Hugging Face's names, as they were before quantization."""
    settings = config(architecture, tied=tied, head_dim=head_dim)
    state = {n: p.detach().numpy() for n, p in random_model(settings).named_parameters()}
    writer = GGUFWriter(str(path), general_architecture or architecture)
    _write_metadata(writer, settings, pre, metadata or {})
    for name, weights in state.items():
        _add(writer, architecture, name, weights, kind)
    for name, weights in (extra or {}).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def _add(
    writer: GGUFWriter,
    architecture: str,
    name: str,
    weights: np.ndarray,
    kind: GGMLQuantizationType,
) -> None:
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if architecture == "llama" and heads:
        weights = permute(weights, heads)
    weights = np.ascontiguousarray(weights)
    if weights.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(gguf_name(name), weights)
    else:
        writer.add_tensor(gguf_name(name), quantize(weights, kind), raw_dtype=kind)


def _write_metadata(
    writer: GGUFWriter, settings: PretrainedConfig, pre: str, more: dict[str, Any]
) -> None:
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_rope_freq_base(settings.rope_parameters["rope_theta"])
    if settings.model_type == "qwen3":
        writer.add_key_length(settings.head_dim)
        writer.add_value_length(settings.head_dim)
    else:
        writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens())
    writer.add_token_types([CONTROL if t.startswith("<|") else NORMAL for t in tokens()])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_chat_template("{{ messages }}")
    for key, value in more.items():
        add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
        add.get(type(value), writer.add_uint32)(key, value)
