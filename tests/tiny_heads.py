"""Tiny EAGLE and Medusa heads, written in every layout in which such heads are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_checkpoints import VOCAB

HIDDEN = 32  # of the target, and of the head unless a test says otherwise
INNER = 48
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
KEPT = np.array([0, 3, 4, 9, 31, 256, 257, 270, 271, 299])  # target ids that a head proposes

State = dict[str, torch.Tensor]


def layer_config(**changes: Any) -> dict[str, Any]:
    """Keys of the one decoder layer, as config.json has them."""
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
    } | changes


def published_config(**changes: Any) -> dict[str, Any]:
    """As SafeAILab writes an EAGLE-3 head's config.json."""
    stated = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float16",
        "bos_token_id": 256,
        "eos_token_id": [257],
        "tie_word_embeddings": False,
        "draft_vocab_size": len(KEPT),
    }
    return layer_config() | stated | changes


def speculators_config(*, layer: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """As the speculators library writes it."""
    stated = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": len(KEPT),
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": layer_config(**(layer or {})),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "acme/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    return stated | changes


def eagle1_config(**changes: Any) -> dict[str, Any]:
    return layer_config(architectures=["LlamaForCausalLM"], **changes)


def random_state(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> State:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def layer_shapes(width: int, *, hidden: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    """Of one decoder layer whose q, k and v read `width` values."""
    return {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, hidden),
        "mlp.up_proj.weight": (INNER, hidden),
        "mlp.down_proj.weight": (hidden, INNER),
        "post_attention_layernorm.weight": (hidden,),
    }


def eagle3_state(
    prefix: str = "midlayer.",
    *,
    hidden: int = HIDDEN,
    target_hidden: int = HIDDEN,
    kept: np.ndarray = KEPT,
    dtype: torch.dtype = torch.float16,
) -> State:
    """Without an embedding, as published heads have it."""
    layer = layer_shapes(2 * hidden, hidden=hidden) | {
        "hidden_norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
    }
    shapes = {prefix + name: shape for name, shape in layer.items()} | {
        "fc.weight": (hidden, 3 * target_hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (len(kept), hidden),
    }
    return random_state(shapes, dtype) | maps(kept)


def maps(kept: np.ndarray = KEPT) -> State:
    return {
        "d2t": torch.from_numpy(kept - np.arange(len(kept))),
        "t2d": torch.isin(torch.arange(VOCAB), torch.from_numpy(kept)),
    }


def embedding(hidden: int = HIDDEN, dtype: torch.dtype = torch.float16) -> State:
    return random_state({"embed_tokens.weight": (VOCAB, hidden)}, dtype)


def eagle1_state(*, bias: bool = True) -> State:
    layer = {"layers.0." + name: shape for name, shape in layer_shapes(HIDDEN).items()}
    fc = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | ({"fc.bias": (HIDDEN,)} if bias else {})
    return random_state(layer | fc, torch.float16) | embedding()


def write_head(
    directory: Path,
    config: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    file: str = "model.safetensors",
) -> Path:
    """config.json and one file of weights, pickled where its name says so."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(dict(state), directory / file)
    else:
        torch.save(dict(state), directory / file)
    return directory


def medusa_state(
    *, heads: int = 3, layers: int = 1, version: int = 1, rows: int = VOCAB, prefix: str = ""
) -> State:
    """As FasterDecoding saves it; version 2 has no output matrices."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(layers):
            shapes[f"{prefix}{i}.{j}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{prefix}{i}.{j}.linear.bias"] = (HIDDEN,)
        if version == 1:
            shapes[f"{prefix}{i}.{layers}.weight"] = (rows, HIDDEN)
    return random_state(shapes, torch.float16)


def vllm_medusa_state(*, heads: int = 2, layers: int = 2, rows: int = VOCAB) -> State:
    """As vLLM reads it: no biases."""
    shapes = {
        f"blocks.{i}.layers.{j}.weight": (HIDDEN, HIDDEN)
        for i in range(heads)
        for j in range(layers)
    } | {f"lm_heads.{i}.weight": (rows, HIDDEN) for i in range(heads)}
    return random_state(shapes, torch.bfloat16)


def medusa_config(**changes: Any) -> dict[str, Any]:
    stated = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    return stated | {"base_model_name_or_path": "acme/target"} | changes
