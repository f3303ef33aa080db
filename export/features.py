"""What a configuration may ask for that the traced graph would not carry: refused by name.

A dropped feature gives fluent text from a slightly different model, so the rule is to refuse
whatever isn't known to be carried. What passes here is checked again where it can be seen: the
attention function refuses arguments that it doesn't know, the mask is evaluated (`export.masks`),
and the build compares the written graph with the eager model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PretrainedConfig

from runtime.errors import UnsupportedModel

logger = logging.getLogger(__name__)

# Model types that tests/test_families.py compares with their eager model, whole and in chunks.
TESTED = frozenset(
    {"cohere", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite",
     "llama", "mistral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm",
     "starcoder2"}
)  # fmt: skip

# Model types whose configuration doesn't show what they need.
_REFUSED_TYPES = {
    "bloom": "ALiBi position biases",
    "gpt_oss": "attention sinks and a mixture of experts",
    "mpt": "ALiBi position biases",
}

_LAYER_KINDS = frozenset({"full_attention", "sliding_attention", "attention"})
# rope types whose angles depend on nothing but the position
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
_EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"
)  # fmt: skip
_STATES = (
    "ssm_state_size", "mamba_d_state", "mamba_expand", "conv_L_cache", "conv_kernel",
    "linear_conv_kernel_dim", "state_size", "lru_width", "attention_hidden_size", "d_conv",
)  # fmt: skip


def refuse_unsupported(config: PretrainedConfig, max_context: int) -> None:
    """Raise UnsupportedModel naming the model type and the feature that isn't carried.

    Warns for a model type that the families' tests don't cover: parity at build decides there.
    """
    for feature in _uncarried(config, max_context):
        raise UnsupportedModel(
            f"{config.model_type}: received a model with {feature}. Expected a decoder whose "
            "layers keep keys and values only, under a causal or sliding-window mask; this "
            "feature isn't carried and would change the text unseen."
        )
    if not is_tested(config):
        logger.warning(
            "%s: not among the tested model types (%s); the build stands or falls with its "
            "comparison with the eager model.",
            config.model_type,
            ", ".join(sorted(TESTED)),
        )


def refuse_unproven(config: PretrainedConfig, needs_bytes: int, free_bytes: int) -> None:
    """Refuse an untested model type that can't be compared with its eager model either."""
    if not is_tested(config) and needs_bytes > free_bytes:
        raise UnsupportedModel(
            f"{config.model_type}: received a model type that isn't among the tested ones, and "
            f"{free_bytes / 1e9:.1f} GB of free memory where its eager model needs "
            f"{needs_bytes / 1e9:.1f} GB. Expected one or the other, so that the graph can be "
            f"trusted; build on a larger machine. Tested: {', '.join(sorted(TESTED))}."
        )


def is_tested(config: PretrainedConfig) -> bool:
    return config.model_type in TESTED


def carried(config: PretrainedConfig) -> PretrainedConfig:
    """A copy to trace: `dynamic` RoPE, not refused, is the default one within its maximum."""
    copied = copy.deepcopy(config)
    for rope in _ropes(copied):
        if rope.get("rope_type") == "dynamic":
            rope["rope_type"] = "default"
    return copied


def _uncarried(config: PretrainedConfig, max_context: int) -> Iterator[str]:
    for check in _CHECKS:
        feature = check(config)
        if feature:
            yield feature
    for rope in _ropes(config):
        feature = _rope_feature(config, rope, max_context)
        if feature:
            yield feature


def _known_type(config: PretrainedConfig) -> str | None:
    return _REFUSED_TYPES.get(config.model_type)


def _direction(config: PretrainedConfig) -> str | None:
    if _value(config, "is_encoder_decoder"):
        return "an encoder and a decoder (is_encoder_decoder)"
    if _value(config, "add_cross_attention"):
        return "cross-attention (add_cross_attention)"
    if _value(config, "use_bidirectional_attention"):
        return "attention in both directions (use_bidirectional_attention)"
    return None


def _experts(config: PretrainedConfig) -> str | None:
    for name in _EXPERTS:
        if (_value(config, name) or 0) > 1:
            return f"a mixture of experts ({name} = {getattr(config, name)})"
    return None


def _state(config: PretrainedConfig) -> str | None:
    kinds = set(_value(config, "layer_types") or ()) - _LAYER_KINDS
    kinds |= set(_value(config, "layers_block_type") or ()) - _LAYER_KINDS
    if kinds:
        return f"layers that keep another state than keys and values (layer_types {sorted(kinds)})"
    for name in _STATES:
        if _value(config, name):
            return f"layers that keep another state than keys and values ({name})"
    return None


def _latent(config: PretrainedConfig) -> str | None:
    rank = _value(config, "kv_lora_rank")
    return f"multi-head latent attention (kv_lora_rank = {rank})" if rank else None


def _shared_cache(config: PretrainedConfig) -> str | None:
    shared = _value(config, "num_kv_shared_layers")
    return (
        f"key/value caches shared between layers (num_kv_shared_layers = {shared})"
        if shared
        else None
    )


def _alibi(config: PretrainedConfig) -> str | None:
    nested = _value(config, "attn_config")
    if _value(config, "alibi") or getattr(nested, "alibi", False):
        return "ALiBi position biases (alibi)"
    return None


def _chunks(config: PretrainedConfig) -> str | None:
    size = _value(config, "attention_chunk_size")
    return f"chunked attention (attention_chunk_size = {size})" if size else None


_CHECKS: tuple[Callable[[PretrainedConfig], str | None], ...] = (
    _known_type, _direction, _alibi, _latent, _state, _experts, _shared_cache, _chunks,
)  # fmt: skip


def _value(config: PretrainedConfig, name: str) -> Any:
    """An attribute, None where there is none; True where it differs between layers."""
    try:
        return getattr(config, name, None)
    except AttributeError:
        return None
    except Exception:  # transformers refuses to name one value for all layers
        return True


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The rope parameters of every kind of layer: one dictionary, or one a layer type."""
    values = _value(config, "rope_parameters")
    if not isinstance(values, dict):
        return []
    nested = [v for v in values.values() if isinstance(v, dict)]
    return nested or [values]


def _rope_feature(config: PretrainedConfig, rope: dict[str, Any], max_context: int) -> str | None:
    """RoPE whose angles depend on the running length, unless the context never gets so long."""
    kind = rope.get("rope_type", "default")
    if kind in _ROPE_TYPES:
        return None
    if kind not in ("dynamic", "longrope"):
        return f"rope_type {kind!r}"
    most = config.max_position_embeddings
    if kind == "longrope":
        most = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", most
        )
    if max_context <= most:
        return None
    return (
        f"rope_type {kind!r}, whose angles change once the text is longer than {most} tokens "
        f"(--max-context {most} or less is carried; received {max_context})"
    )
