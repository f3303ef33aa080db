"""What an EAGLE head's config.json says, in whichever of its formats.

EAGLE-3 as published (SafeAILab/EAGLE): a Llama config with `draft_vocab_size`. EAGLE-3 of the
speculators library: the layer nested in `transformer_layer_config`, which leaves out what is the
configuration class's default. EAGLE-1 and -2: a Llama config and no more. Options that change the
forward pass (`norm_before_residual`, …) are read from all of them, for vLLM reads them so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from runtime.errors import CheckpointError, UnsupportedModel

from .config_value import config_value

TAP_IDS = "eagle_aux_hidden_state_layer_ids"
_TYPE = "speculators_model_type"
# Model type of the layer → the configuration class that describes it. A Qwen2 layer is a Llama
# layer whose q, k and v have biases.
_LAYER_TYPES = {"llama": "llama", "qwen2": "llama", "qwen3": "qwen3"}
_LAYER_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
_ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    name: str  # the head's, for messages
    version: int  # 3, or 1 for EAGLE-1 and -2
    layer: PretrainedConfig
    biased: frozenset[str]  # of q, k, v, o: the projections with a bias
    fc_bias: bool | None  # None: the file decides
    target_hidden_size: int
    draft_vocab_size: int | None
    taps: tuple[int, ...] | None  # indices into HF hidden_states; None: the default ones
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norms: bool
    norm_output: bool
    made_for: str | None  # name of the target that the head was trained on
    made_for_architectures: tuple[str, ...]


def read_eagle_config(raw: Mapping[str, Any], tensors: Collection[str], name: str) -> EagleConfig:
    """raw: config.json; tensors: the file's names, which alone tell EAGLE-3 from EAGLE-1.

    Raises UnsupportedModel for a head that isn't carried, CheckpointError for a broken config.
    """
    _check_type(raw, name)
    nested = config_value(raw, "transformer_layer_config", dict, name) or raw
    layer = _layer(nested, name)
    made_for = _made_for(raw, name)
    return EagleConfig(
        name=name,
        version=3 if _TYPE in raw or _is_version_3(tensors) else 1,
        layer=layer,
        biased=_biased(nested),
        fc_bias=config_value(raw, "bias", bool, name),
        target_hidden_size=config_value(raw, "target_hidden_size", int, name) or layer.hidden_size,
        draft_vocab_size=config_value(raw, "draft_vocab_size", int, name),
        taps=_taps(raw, name),
        norm_before_residual=_flag(raw, "norm_before_residual", name),
        norm_before_fc=_flag(raw, "norm_before_fc", name),
        fc_norms=_flag(raw, "fc_norm", name),
        norm_output=_flag(raw, "norm_output", name),
        made_for=config_value(made_for, "name_or_path", str, name),
        made_for_architectures=tuple(config_value(made_for, "architectures", list, name) or ()),
    )


def _made_for(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    library = config_value(raw, "speculators_config", dict, name) or {}
    return config_value(library, "verifier", dict, name) or {}


def _eagle_config(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return config_value(raw, "eagle_config", dict, name) or {}


def _flag(raw: Mapping[str, Any], key: str, name: str) -> bool:
    return config_value(raw, key, bool, name) or False


def _is_version_3(tensors: Collection[str]) -> bool:
    return any(n.startswith("midlayer.") or n.endswith("hidden_norm.weight") for n in tensors)


def _check_type(raw: Mapping[str, Any], name: str) -> None:
    kind = raw.get(_TYPE, "eagle3")
    if kind != "eagle3":
        raise UnsupportedModel(
            f"{name}: received {_TYPE} {kind!r}. Expected 'eagle3'; of the speculators library's "
            "drafters only that one is carried."
        )
    if _eagle_config(raw, name).get("use_aux_hidden_state") is False:
        raise UnsupportedModel(
            f"{name}: received use_aux_hidden_state false, an EAGLE-3 head without taps. Expected "
            "a head that reads three hidden states of its target."
        )
    if raw.get("norm_before_fc") and raw.get("fc_norm"):
        raise CheckpointError(
            f"{name}: received both norm_before_fc and fc_norm. Expected one of them; mend "
            "config.json after the head's training script."
        )


def _layer(nested: Mapping[str, Any], name: str) -> PretrainedConfig:
    """The one decoder layer; a key that is missing has the configuration class's default."""
    kind = config_value(nested, "model_type", str, name) or "llama"
    if kind not in _LAYER_TYPES:
        raise UnsupportedModel(
            f"{name}: received a layer of model type {kind!r}. Expected one of "
            f"{sorted(_LAYER_TYPES)}."
        )
    values = {key: nested[key] for key in _LAYER_KEYS if nested.get(key) is not None}
    try:
        layer = CONFIG_MAPPING[_LAYER_TYPES[kind]](**values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise CheckpointError(
            f"{name}: received a configuration that transformers refuses "
            f"({' '.join(str(error).split())}). Expected a {kind} layer; mend config.json."
        ) from error
    _check_layer(layer, nested, name)
    return layer


def _check_layer(layer: PretrainedConfig, nested: Mapping[str, Any], name: str) -> None:
    if layer.num_hidden_layers != 1:
        raise UnsupportedModel(
            f"{name}: received num_hidden_layers {layer.num_hidden_layers}. Expected 1: an EAGLE "
            "head of one decoder layer."
        )
    if layer.hidden_act not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{name}: received hidden_act {layer.hidden_act!r}. Expected 'silu', which published "
            "heads have."
        )
    if _windowed(nested, name):
        raise UnsupportedModel(
            f"{name}: received a layer with a sliding window. Expected full attention."
        )


def _windowed(nested: Mapping[str, Any], name: str) -> bool:
    """Qwen3 states a window that it doesn't use unless told to; a Llama layer states none."""
    used = nested.get("use_sliding_window", nested.get("model_type") != "qwen3")
    kinds = config_value(nested, "layer_types", list, name) or ()
    return "sliding_attention" in kinds or bool(used and nested.get("sliding_window"))


def _biased(nested: Mapping[str, Any]) -> frozenset[str]:
    if nested.get("attention_bias"):
        return frozenset("qkvo")
    if nested.get("qkv_bias", nested.get("model_type") == "qwen2"):
        return frozenset("qkv")
    return frozenset()


def _taps(raw: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """As indices into HF hidden_states, where 0 is the embedding and i the input of layer i.

    At the top level (speculators, vLLM) an id is that index. Inside `eagle_config` (SGLang,
    SpecForge, ModelOpt) it may also name the layer whose output is meant, one less; as SGLang
    tells them apart, the lowest is 1 then (github.com/sgl-project/sglang/pull/25454).
    """
    own = config_value(raw, TAP_IDS, list, name)
    nested = config_value(_eagle_config(raw, name), TAP_IDS, list, name)
    ids = nested if own is None else own
    if ids is None:
        return None
    if not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{name}: received {TAP_IDS} {ids!r}. Expected a list of layer numbers, or null for "
            "the default ones."
        )
    outputs = own is None and ids[:1] == [1]
    return tuple(i + 1 for i in ids) if outputs else tuple(ids)
