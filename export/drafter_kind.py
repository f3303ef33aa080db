"""Which kind of drafter a directory or hub id holds, so that nobody has to say it.

What config.json calls a head can't be trusted (an EAGLE head says `LlamaForCausalLM`), so the names
of the tensors have the last word. Only headers are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from runtime.errors import CheckpointError

from .head_files import head_directory, read_weights
from .medusa_layout import is_medusa_name
from .text_files import read_optional_json


class DrafterKind(Enum):
    MODEL = "model"
    EAGLE = "eagle"
    MEDUSA = "medusa"


def read_kind(source: str | Path) -> DrafterKind:
    """MODEL where nothing says otherwise, and for a `.gguf` file.

    Raises CheckpointError for what is neither a path nor a hub id that can be read.
    """
    if Path(source).suffix == ".gguf":
        return DrafterKind.MODEL
    directory = head_directory(source)
    config = read_optional_json(directory / "config.json")
    return _stated(config) or _by_names(_names(directory))


def _stated(config: Mapping[str, Any]) -> DrafterKind | None:
    """What config.json says beyond doubt."""
    if "speculators_model_type" in config:
        return DrafterKind.EAGLE  # of the library's drafters the one that is carried
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return DrafterKind.MEDUSA
    return None


def _by_names(names: Collection[str]) -> DrafterKind:
    if any(name == "fc.weight" or name.startswith("midlayer.") for name in names):
        return DrafterKind.EAGLE
    if names and all(is_medusa_name(name) for name in names):
        return DrafterKind.MEDUSA
    return DrafterKind.MODEL


def _names(directory: Path) -> frozenset[str]:
    """Empty where no weights can be read: opening the model says what is wrong with them."""
    try:
        return read_weights(directory).names()
    except CheckpointError:
        return frozenset()
