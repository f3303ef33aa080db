"""Read from transformers' mask function which cache rows a query may see.

A model's eager attention obeys the mask it asks for, whatever else it tells the attention function.
So the mask is evaluated here, at every position up to `max_context`, and recognised: causal, or
causal within a sliding window. Any other (chunks, blocks, prefixes, both directions) is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from runtime.errors import UnsupportedModel

_MaskFunction = Callable[..., torch.Tensor]
_ROWS = 64  # query rows looked at: the first, the last, and those in between at equal distances


@dataclass(frozen=True, kw_only=True)
class AskedMask:
    """What the model gets instead of a mask tensor, and hands to its attention unread."""

    window: int | None  # cache rows that a query sees, itself included; None: all before it


def read_mask(function: _MaskFunction, max_context: int, model_type: str) -> AskedMask:
    """Recognise `function(batch, head, query, column) -> bool`.

    Raises UnsupportedModel for a mask that depends on the input or is of another kind.
    """
    try:
        with _concrete():
            query, column = _positions(max_context)
            zero = torch.zeros((), dtype=torch.int64)
            seen = function(zero, zero, query, column).expand(len(query), max_context)
            window = int(seen[-1].sum())
            known = torch.equal(seen, (column <= query) & (column > query - window))
    except Exception as error:  # whatever a foreign closure may raise on plain positions
        raise UnsupportedModel(
            f"{model_type}: the attention mask depends on more than positions ({error}). Expected "
            "a causal or sliding-window mask; this model can't be exported exactly."
        ) from error
    if not known:
        raise UnsupportedModel(
            f"{model_type}: the attention mask is neither causal nor a sliding window (chunked, "
            "blockwise or bidirectional attention). This model can't be exported exactly."
        )
    return AskedMask(window=window if window < max_context else None)


def _positions(max_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query positions [rows, 1], the last one among them; columns [1, max_context]."""
    rows = torch.linspace(0, max_context - 1, min(_ROWS, max_context)).round().long()
    rows = torch.unique(torch.cat([rows, torch.tensor([max_context - 1])]))
    return rows[:, None], torch.arange(max_context)[None, :]


@contextlib.contextmanager
def _concrete() -> Iterator[None]:
    """Real tensors in the middle of a trace, which is none of the trace's business."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
