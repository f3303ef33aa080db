"""Which tensors an EAGLE head has, under one set of names whatever the file calls them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from runtime.errors import CheckpointError

from .eagle_config import EagleConfig
from .names import shorten
from .tensor_store import TensorStore

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
MAPS = frozenset({"d2t", "t2d"})
# What training leaves in the file and no forward pass of a drafter reads.
_UNUSED = re.compile(r"verifier_(lm_head|norm)\.weight|.*rotary_emb\.inv_freq")
_LAYER = "layers.0."


def canonical_names(tensors: TensorStore) -> dict[str, str]:
    """Canonical name → the file's: EAGLE-3 as published has `midlayer.` for `layers.0.`."""
    return {
        re.sub(r"^midlayer\.", _LAYER, name): name
        for name in tensors.names()
        if not _UNUSED.fullmatch(name)
    }


def head_shapes(
    config: EagleConfig, tensors: TensorStore, *, rows: int, target_vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape, for every parameter of the forward pass.

    rows: D, of the output head. tensors: the file's, by canonical names; they decide only whether
    `fc` of an EAGLE-1 head has a bias.
    """
    hidden = config.layer.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (target_vocab_size, hidden)}
    shapes |= _fusion_shapes(config, tensors)
    shapes |= {_LAYER + name: shape for name, shape in _layer_shapes(config)}
    if config.version == 3:
        shapes["norm.weight"] = (hidden,)
    return shapes | {HEAD: (rows, hidden)}


def check_shapes(name: str, tensors: TensorStore, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the file, with what it borrows, has exactly these tensors."""
    names = tensors.names() - MAPS
    missing = sorted(expected.keys() - names)
    unexpected = sorted(names - expected.keys())
    misshaped = [
        f"{key} {list(tensors.shape(key))} instead of {list(expected[key])}"
        for key in sorted(names & expected.keys())
        if tensors.shape(key) != expected[key]
    ]
    if missing or unexpected or misshaped:
        raise CheckpointError(
            f"{name}: {_list('missing', missing)}{_list('of another shape', misshaped)}"
            f"{_list('unexpected', unexpected)}Expected exactly the tensors of the head that "
            "config.json describes; they are of different heads, or of a variant that isn't "
            "carried. Download both again, or save the head again."
        )


def _fusion_shapes(config: EagleConfig, tensors: TensorStore) -> dict[str, tuple[int, ...]]:
    """`fc` and the norms before it: of the taps, or of an embedding and one hidden state."""
    hidden, target = config.layer.hidden_size, config.target_hidden_size
    if config.version == 1:
        biased = "fc.bias" in tensors.names() if config.fc_bias is None else config.fc_bias
        return {"fc.weight": (hidden, hidden + target)} | ({"fc.bias": (hidden,)} if biased else {})
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * target)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (3 * target,)
    if config.fc_norms:
        shapes |= {f"fc_norm.{j}.weight": (target,) for j in range(3)}
    return shapes


def _layer_shapes(config: EagleConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    layer = config.layer
    hidden, inner = layer.hidden_size, layer.intermediate_size
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for norm in norms if config.version == 3 else norms[2:]:
        yield f"{norm}.weight", (hidden,)
    yield from _attention_shapes(config)
    for name, shape in (
        ("gate", (inner, hidden)),
        ("up", (inner, hidden)),
        ("down", (hidden, inner)),
    ):
        yield f"mlp.{name}_proj.weight", shape
        if getattr(layer, "mlp_bias", False):
            yield f"mlp.{name}_proj.bias", shape[:1]


def _attention_shapes(config: EagleConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """q, k and v of EAGLE-3 read the embedding and the hidden state side by side."""
    layer = config.layer
    width = layer.hidden_size * (2 if config.version == 3 else 1)
    query = layer.num_attention_heads * layer.head_dim
    key = layer.num_key_value_heads * layer.head_dim
    shapes = {
        "q": (query, width), "k": (key, width), "v": (key, width), "o": (layer.hidden_size, query)
    }  # fmt: skip
    for name, shape in shapes.items():
        yield f"self_attn.{name}_proj.weight", shape
        if name in config.biased:
            yield f"self_attn.{name}_proj.bias", shape[:1]
    if layer.model_type == "qwen3":
        yield "self_attn.q_norm.weight", (layer.head_dim,)
        yield "self_attn.k_norm.weight", (layer.head_dim,)


def _list(what: str, names: list[str]) -> str:
    return f"{len(names)} {what}: {shorten(names)}. " if names else ""
