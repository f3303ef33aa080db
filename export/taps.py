"""Hidden states of a decoder that a drafter reads, taken out beside the logits.

State i is the input of layer i, as transformers numbers `hidden_states`; state N, for a decoder of
N layers, is the one behind its last norm. Taken by hooks, so that the model's code stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from runtime.errors import UnsupportedModel


def feature_width(config: PretrainedConfig, taps: Sequence[int]) -> int:
    return int(config.hidden_size) * len(taps)


class Taps:
    """Hooks on `model`; after a forward pass `joined` is its states in the order of `taps`."""

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        layers, norm = _parts(model)
        self._order = tuple(taps)
        self._states: dict[int, torch.Tensor] = {}
        for tap in sorted(set(taps)):
            if not 0 <= tap <= len(layers):
                raise UnsupportedModel(
                    f"taps: received state {tap}. Expected 0 to {len(layers)}, the layers of "
                    f"{type(model).__name__}; use the target that the head was made for."
                )
            if tap < len(layers):
                layers[tap].register_forward_pre_hook(self._keep_input(tap), with_kwargs=True)
            else:
                norm.register_forward_hook(self._keep_output(tap))

    def joined(self) -> torch.Tensor:
        """[batch, query_len, feature_width] of the last forward pass."""
        return torch.cat([self._states[tap] for tap in self._order], dim=-1)

    def _keep_input(self, tap: int) -> Any:
        def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[tap] = args[0] if args else kwargs["hidden_states"]

        return keep

    def _keep_output(self, tap: int) -> Any:
        def keep(_: Any, __: Any, output: torch.Tensor) -> None:
            self._states[tap] = output

        return keep


def _parts(model: Any) -> tuple[Any, Any]:
    base = model.base_model
    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    if layers is None or norm is None:
        raise UnsupportedModel(
            f"{type(model).__name__}: received a decoder without `layers` and `norm`. Expected a "
            "Llama-like one, whose hidden states a head can read; use a draft model or ngram."
        )
    return layers, norm
