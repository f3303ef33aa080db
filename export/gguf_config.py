"""The configuration of a GGUF model, from llama.cpp's metadata.

A GGUF has no config.json. The keys are those that transformers reads (a test compares the two); in
addition whatever would change the mathematics and is not among them is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from runtime.errors import CheckpointError, UnsupportedModel

from .gguf_file import GgufFile
from .model_config import check_config

# llama.cpp stores Mistral and others under `llama`; the weights and the mathematics are the same.
ARCHITECTURES = ("llama", "qwen2", "qwen3")

_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Metadata that changes the mathematics, with the values that do not.
_PLAIN = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}


def gguf_config(file: GgufFile) -> PretrainedConfig:
    """Raises UnsupportedModel for another architecture or feature, CheckpointError if lost."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path.name}: received GGUF architecture {architecture!r}. Expected one of "
            f"{', '.join(ARCHITECTURES)}; use the model's safetensors checkpoint."
        )
    prefix = f"{architecture}."
    stated = {k[len(prefix) :]: v for k, v in file.metadata.items() if k.startswith(prefix)}
    _refuse_features(file, stated)
    try:
        values = {name: stated[key] for key, name in _KEYS.items()}
        values |= _attention(file, stated) | _special_ids(file.metadata)
    except KeyError as error:
        raise CheckpointError(
            f"{file.path.name}: received metadata without {error.args[0]}. Expected the keys of a "
            f"{architecture} model; convert the model again."
        ) from error
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    config = AutoConfig.for_model(architecture, **values)
    config.architectures = [f"{architecture.capitalize()}ForCausalLM"]
    check_config(config, file.path.name)
    return config


def _attention(file: GgufFile, stated: Mapping[str, Any]) -> dict[str, Any]:
    heads = stated["attention.head_count"]
    projection = file.tensors.get("blk.0.attn_q.weight")
    embedding = file.tensors.get("token_embd.weight")
    if projection is None or embedding is None:
        raise KeyError("blk.0.attn_q.weight and token_embd.weight")
    head_dim = stated.get("attention.key_length", projection.shape[0] // heads)
    rotary = stated.get("rope.dimension_count", head_dim)
    if rotary != head_dim or stated.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{file.path.name}: received {rotary} rotary dimensions in heads of {head_dim}. "
            "Expected whole heads; use the model's safetensors checkpoint."
        )
    return {
        "head_dim": head_dim,
        "num_key_value_heads": stated.get("attention.head_count_kv", heads),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": stated.get("rope.freq_base", 10000.0),
        },
        "vocab_size": embedding.shape[0],
    }


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    return {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}


def _refuse_features(file: GgufFile, stated: Mapping[str, Any]) -> None:
    for key, plain in _PLAIN.items():
        if key in stated and stated[key] not in plain:
            raise UnsupportedModel(
                f"{file.path.name}: received {key} = {stated[key]!r}. Expected {plain[0]!r}: GGUF "
                "files with this feature are not carried; use the model's safetensors checkpoint."
            )
    if "rope_freqs.weight" in file.tensors:
        raise UnsupportedModel(
            f"{file.path.name}: received rope_freqs.weight, scaled rotary frequencies. Expected "
            "plain ones: the GGUF does not say which scaling they came from; use the model's "
            "safetensors checkpoint."
        )
