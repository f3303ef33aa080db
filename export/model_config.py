"""A checkpoint's configuration, or a refusal that names what Outrider does not carry.

Nothing that a checkpoint brings along is ever run: models whose code is remote are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from runtime.errors import CheckpointError, UnsupportedModel


def load_config(directory: Path) -> PretrainedConfig:
    """`config.json` as transformers reads it.

    Raises CheckpointError for a missing or broken file, UnsupportedModel for a model type that
    transformers does not know or that is no text decoder.
    """
    raw = read_json(directory / "config.json")
    if "model_type" not in raw:
        raise CheckpointError(
            f"{directory / 'config.json'}: received no model_type. Expected the config.json of a "
            "Hugging Face model."
        )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise UnsupportedModel(
            f"{directory}: received model type {raw['model_type']!r}, which transformers cannot "
            f"read ({_first_line(error)}). Expected a decoder that it ships; code that comes "
            "with a checkpoint is never run."
        ) from error
    check_config(config, str(directory))
    return config


def check_config(config: PretrainedConfig, where: str) -> None:
    """Refuse what is not one plain text decoder with plain weights. Raises UnsupportedModel."""
    refuse = _refusal(config)
    if refuse:
        raise UnsupportedModel(
            f"{where}: received {config.model_type}: {refuse}. Expected a text-only causal decoder "
            "with unquantized weights."
        )


def _refusal(config: PretrainedConfig) -> str | None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = _get(quantization, "quant_method") or "unknown"
        return f"weights quantized with {method!r}; use the checkpoint they were made from"
    parts = sorted(getattr(config, "sub_configs", None) or {})
    if parts or config.get_text_config() is not config:
        return f"a multi-modal model with parts {parts}"
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder and a decoder"
    if model_class(config) is None:
        return "no causal language model of transformers"
    return None


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that AutoModelForCausalLM makes of `config`."""
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    return cast(type[PreTrainedModel], found[0] if isinstance(found, tuple) else found)


def tied_names(config: PretrainedConfig) -> dict[str, str]:
    """Parameters that share another's weights: name → the name that is stored."""
    kind = model_class(config)
    if kind is None or not getattr(config, "tie_word_embeddings", False):
        return {}
    return dict(kind._tied_weights_keys or {})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: received no such file. Expected a Hugging Face checkpoint directory; name a "
            "directory that has one."
        ) from error
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path}: received no readable JSON ({_first_line(error)}). Expected a JSON object; "
            "download it again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: received {type(value).__name__}. Expected a JSON object.")
    return value


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else getattr(value, key, None)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
