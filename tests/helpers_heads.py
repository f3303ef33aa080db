"""Tiny heads beside a tiny target, in shapes that TensorRT has attention kernels for."""

from __future__ import annotations

from pathlib import Path

from tiny_checkpoints import llama_config, save
from tiny_heads import (
    HIDDEN,
    eagle1_config,
    eagle1_state,
    eagle3_state,
    maps,
    medusa_config,
    medusa_state,
    published_config,
    write_head,
)

KINDS = ("eagle3", "eagle1", "medusa")
LAYERS = 4  # of the target
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
CONTEXT = 96  # of the target; a head knows 64 positions
SOFT = 0.3  # of EAGLE-3's output matrix, so that its law isn't all ties and edges
SMALL = 0.15  # of EAGLE-1's weights: it has no norms, and fp16 must bear its states


def save_target(place: Path) -> Path:
    target = place / "target"
    save(target, llama_config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, **ATTENTION))
    return target


def save_head(kind: str, place: Path, *, scale: float = SMALL) -> Path:
    """scale: of EAGLE-1's weights."""
    if kind == "medusa":
        file = "medusa_lm_head.safetensors"
        return write_head(place / kind, medusa_config(), medusa_state(), file)
    if kind == "eagle3":
        taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        config = published_config(eagle_config=taps, **ATTENTION)
        state = eagle3_state() | maps()
        state["lm_head.weight"] *= SOFT
        return write_head(place / kind, config, state)
    state = {name: scale * value for name, value in eagle1_state().items()}
    return write_head(place / kind, eagle1_config(**ATTENTION), state)
