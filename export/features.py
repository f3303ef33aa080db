"""What a configuration may ask for that the traced graph would not carry: refused by name."""

from __future__ import annotations

from transformers import PretrainedConfig

from runtime.errors import UnsupportedModel


def refuse_unsupported(config: PretrainedConfig, max_context: int) -> None:
    pass
