"""Tiny random configurations, one or more a model family: the table that test_families.py runs.

Sizes are chosen to catch mix-ups: head_dim * heads differs from the hidden size where the family
allows it, one KV head or several, windows shorter than the text, rope scaling whose original
maximum is shorter than the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PretrainedConfig

VOCAB = 96
WINDOW = 8
MAX_CONTEXT = 48

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **values}


@dataclass(frozen=True, kw_only=True)
class Family:
    """`sensitive`: changes of the configuration that must change the eager logits visibly.

    They show that the text and the weights would betray a dropped feature.
    """

    name: str
    model_type: str
    values: dict[str, Any] = field(default_factory=dict)
    sensitive: tuple[dict[str, Any], ...] = ()
    slow: bool = False
    rotary: int = 2  # layers whose attention runs RoPE inside
    packed: int = 2  # layers whose attention reads one packed projection
    products: int = 9  # quantized linear layers: 4 a layer and the head
    left: frozenset[str] = frozenset()  # slow operators that this family keeps, known and few

    def config(self, **changes: Any) -> PretrainedConfig:
        return AutoConfig.for_model(self.model_type, **BASE | self.values | changes)


FAMILIES = (
    Family(
        name="llama",
        model_type="llama",
        values={"head_dim": 32, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    Family(
        name="llama-llama3-rope",
        model_type="llama",
        values={
            "tie_word_embeddings": True,
            "rope_parameters": rope(
                "llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        },
        sensitive=({"rope_parameters": rope("default")},),
    ),
    Family(
        name="llama-yarn-rope",
        model_type="llama",
        values={"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16)},
        sensitive=({"rope_parameters": rope("default")},),
        slow=True,
    ),
    Family(name="mistral", model_type="mistral", values={"sliding_window": None}, slow=True),
    Family(
        name="mistral-window",
        model_type="mistral",
        values={"sliding_window": WINDOW, "head_dim": 32},
        sensitive=({"sliding_window": None}, {"sliding_window": WINDOW + 1}),
    ),
    Family(
        name="qwen2",
        model_type="qwen2",
        values={
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        sensitive=({"use_sliding_window": False, "sliding_window": None},),
    ),
    Family(
        name="qwen3",
        model_type="qwen3",
        values={"head_dim": 32, "tie_word_embeddings": True},
        packed=0,  # the norms of queries and keys are in between
    ),
    Family(
        name="smollm3",
        model_type="smollm3",
        values={"no_rope_layer_interval": 2, "no_rope_layers": [1, 0]},
        sensitive=({"no_rope_layers": [1, 1]},),
        rotary=1,
        slow=True,
    ),
    Family(
        name="phi",
        model_type="phi",
        packed=0,
        products=7,
        values={
            "num_key_value_heads": 4,
            "hidden_size": 128,
            "qk_layernorm": True,
            "rope_parameters": {**rope("default"), "partial_rotary_factor": 0.5},
        },
        slow=True,
    ),
    Family(
        name="phi3",
        model_type="phi3",
        values={"sliding_window": WINDOW},
        sensitive=({"sliding_window": None},),
    ),
    Family(
        name="phi3-longrope",
        model_type="phi3",
        values={
            "rope_parameters": rope(
                "longrope",
                short_factor=[1.0 + i / 8 for i in range(8)],
                long_factor=[4.0] * 8,
                original_max_position_embeddings=MAX_CONTEXT,
            ),
            "original_max_position_embeddings": MAX_CONTEXT,
        },
        slow=True,
    ),
    Family(
        name="llama-dynamic-rope",
        model_type="llama",
        values={"rope_parameters": rope("dynamic", factor=2.0)},
        slow=True,
    ),
    Family(name="olmo2", model_type="olmo2", packed=0, slow=True),
    Family(
        name="granite",
        model_type="granite",
        values={
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
        sensitive=(
            {"embedding_multiplier": 1.0},
            {"attention_multiplier": 0.1},
            {"logits_scaling": 1.0},
        ),
        slow=True,
    ),
    Family(
        name="gemma",
        model_type="gemma",
        values={"head_dim": 32, "num_key_value_heads": 1},
        slow=True,
    ),
    Family(
        name="gemma2",
        model_type="gemma2",
        values={
            "head_dim": 32,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
        sensitive=(
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"sliding_window": 64},
        ),
    ),
    Family(
        name="gemma3",
        model_type="gemma3_text",
        packed=0,
        values={
            "head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
        },
        sensitive=({"sliding_window": 64}, {"sliding_window": WINDOW + 1}),
    ),
    Family(
        name="gpt_neox",
        model_type="gpt_neox",
        packed=0,
        values={
            "num_key_value_heads": None,
            "hidden_size": 128,
            "rope_parameters": {**rope("default"), "partial_rotary_factor": 0.5},
        },
        slow=True,
    ),
    Family(
        name="gpt2",
        model_type="gpt2",
        values={
            "num_key_value_heads": None,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
        },
        rotary=0,
    ),
    Family(
        name="opt",
        model_type="opt",
        packed=0,
        values={"num_key_value_heads": None, "ffn_dim": 96, "word_embed_proj_dim": 64},
        rotary=0,
        slow=True,
    ),
    Family(
        name="stablelm",
        model_type="stablelm",
        values={
            "hidden_size": 128,
            "use_qkv_bias": True,
            "qk_layernorm": False,
            "rope_parameters": {**rope("default"), "partial_rotary_factor": 0.25},
        },
        rotary=0,  # 8 of 32: fewer than GroupQueryAttention turns
        packed=0,
        slow=True,
    ),
    Family(
        name="cohere",
        model_type="cohere",
        packed=0,
        products=7,
        values={"logit_scale": 0.25},
        sensitive=({"logit_scale": 1.0},),
    ),
    Family(
        name="starcoder2",
        model_type="starcoder2",
        values={"sliding_window": WINDOW, "use_bias": True},
        sensitive=({"sliding_window": None},),
        slow=True,
    ),
    Family(
        name="exaone4",
        model_type="exaone4",
        packed=0,
        rotary=1,
        values={
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        sensitive=({"sliding_window": 64},),
        slow=True,
    ),
    Family(
        name="glm4",
        model_type="glm4",
        values={
            "head_dim": 32,
            "rope_parameters": {**rope("default"), "partial_rotary_factor": 0.5},
        },
        slow=True,
    ),
)

_LAYERS = {"num_hidden_layers": 2}
# Model type (and what of it) → configuration, words of the refusal.
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": (_LAYERS, "attention sinks"),
    "mixtral": (BASE, "mixture of experts"),
    "qwen3_moe": (BASE, "mixture of experts"),
    "olmoe": (BASE, "mixture of experts"),
    "deepseek_v3": (_LAYERS, "latent attention"),
    "minicpm3": (_LAYERS, "latent attention"),
    "qwen3_next": (_LAYERS, "another state than keys and values"),
    "lfm2": (_LAYERS, "another state than keys and values"),
    "mamba": (_LAYERS, "another state than keys and values"),
    "bamba": (_LAYERS, "another state than keys and values"),
    "jamba": (_LAYERS, "another state than keys and values"),
    "falcon_h1": (_LAYERS, "another state than keys and values"),
    "recurrent_gemma": (_LAYERS, "another state than keys and values"),
    "gemma3n_text": ({}, "caches shared between layers"),
    "llama4_text": ({**_LAYERS, "num_local_experts": 1}, "chunked_attention"),
    "bloom": (_LAYERS, "ALiBi"),
    "mpt": ({"n_layers": 2}, "ALiBi"),
    "falcon:alibi": ({**_LAYERS, "alibi": True}, "ALiBi"),
    "bart": (_LAYERS, "an encoder and a decoder"),
    "t5": (_LAYERS, "an encoder and a decoder"),
    "gpt2:cross": ({"n_layer": 2, "add_cross_attention": True}, "cross-attention"),
    "gemma3_text:bidirectional": (
        {**BASE, "use_bidirectional_attention": True},
        "both directions",
    ),
}
