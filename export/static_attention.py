"""The attention that a traced model calls: it writes static caches and carries every argument.

Transformers' models look up their attention and mask functions by name; the two registered here
know the trace that is running. Keys and values are appended to static caches (`TensorScatter`), and
`Attention` reads them under a mask made from per-row lengths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from runtime.errors import BuildError, UnsupportedModel

from .masks import AskedMask, read_mask

OPSET = 24
ATTENTION_NAME = "outrider_static_cache"
# Keyword arguments of an attention call that change nothing in an inference graph.
_INERT = frozenset(
    {"dropout", "position_ids", "is_causal", "use_cache", "output_attentions", "cache_position",
     "output_hidden_states", "return_dict", "layer_idx", "head_mask", "logits_to_keep",
     "past_key_values", "position_embeddings", "output_router_logits", "num_items_in_batch",
     "sliding_window"}  # the mask has the window that counts
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Where the query rows, and rows before them, stand in a tree: `runtime.contract.VISIBLE`."""

    depths: torch.Tensor  # [batch, tree_len] i64
    visible: torch.Tensor  # [batch, query_len, tree_len] bool

    def first_column(
        self, past_lengths: torch.Tensor, query_len: int | torch.SymInt
    ) -> torch.Tensor:
        """The cache row that `visible` begins with: [batch, 1] i64."""
        return past_lengths[:, None].long() - (self.depths.shape[1] - query_len)

    def positions(self, past_lengths: torch.Tensor, query_len: int | torch.SymInt) -> torch.Tensor:
        last = torch.arange(query_len) + (self.depths.shape[1] - query_len)
        depths = torch.index_select(self.depths, 1, last)
        return self.first_column(past_lengths, query_len) + depths

    def mask(
        self, past_lengths: torch.Tensor, max_context: int, window: int | None
    ) -> torch.Tensor:
        """[batch, 1, query_len, max_context] bool."""
        query_len, tree_len = self.visible.shape[1], self.visible.shape[2]
        first = self.first_column(past_lengths, query_len)
        column = torch.arange(max_context)[None, :]
        offset = column - first  # [batch, max_context]
        before = (offset < 0)[:, None, :]
        inside = offset.clamp(min=0)
        inside = torch.minimum(inside, torch.full((1, 1), 1) * (tree_len - 1))
        index = inside[:, None, :].expand(-1, query_len, -1)
        seen = torch.gather(self.visible, 2, index) & (offset < tree_len)[:, None, :]
        seen = before | seen
        if window is not None:
            depth = torch.gather(self.depths, 1, inside)
            at = torch.where(offset < 0, column, first + depth)
            position = self.positions(past_lengths, query_len)
            seen = seen & (at[:, None, :] > position[:, :, None] - window)
        return seen[:, None]


@dataclass(kw_only=True)
class AttentionRecorder:
    """The state of one trace: caches in, caches out, and the masks that layers share."""

    past_lengths: torch.Tensor  # [batch] i32
    max_context: int
    past: list[torch.Tensor]  # 2 a layer, [batch, kv_heads, max_context, head_dim]
    tree: Tree | None = None  # None: the query rows are a chain
    present: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, query_len: int | torch.SymInt, window: int | None) -> torch.Tensor:
        """Which cache rows each query row may see: [batch, 1, query_len, max_context] bool."""
        if window not in self.masks:
            seen = self._chain(query_len, window) if self.tree is None else self._tree(window)
            self.masks[window] = seen
        return self.masks[window]

    def positions(self, query_len: int | torch.SymInt) -> torch.Tensor:
        """Of each query row: [batch, query_len] i64."""
        if self.tree is not None:
            return self.tree.positions(self.past_lengths, query_len)
        return self.past_lengths[:, None].long() + torch.arange(query_len)[None, :]

    def _chain(self, query_len: int | torch.SymInt, window: int | None) -> torch.Tensor:
        position = self.positions(query_len)[:, None, :, None]
        column = torch.arange(self.max_context)
        seen = column <= position
        return seen if window is None else seen & (column > position - window)

    def _tree(self, window: int | None) -> torch.Tensor:
        assert self.tree is not None
        return self.tree.mask(self.past_lengths, self.max_context, window)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [batch, heads, query_len, head_dim]
        key: torch.Tensor,  # [batch, kv_heads, query_len, head_dim]
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float,
    ) -> torch.Tensor:
        """Append to the caches, attend; returns [batch, heads, query_len, head_dim]."""
        cached_key = self._append(self.past[2 * layer], key)
        cached_value = self._append(self.past[2 * layer + 1], value)
        self.present[layer] = (cached_key, cached_value)
        attributes: dict[str, Any] = {"scale": scale}
        if softcap:
            attributes["softcap"] = softcap
        return torch.onnx.ops.symbolic(
            "Attention",
            (query, cached_key, cached_value, self.mask(query.shape[2], window)),
            attributes,
            dtype=query.dtype,
            shape=query.shape,
            version=OPSET,
            metadata_props={"outrider.layer": str(layer), "outrider.window": str(window or 0)},
        )

    def _append(self, cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            (cache, rows, self.past_lengths.long()),
            {"axis": 2, "mode": "linear"},
            dtype=cache.dtype,
            shape=cache.shape,
            version=OPSET,
        )


_recorder: AttentionRecorder | None = None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AskedMask | torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every attention layer of the traced model."""
    if _recorder is None:
        raise BuildError("attention called outside a trace; call export.trace.trace_decoder.")
    dropped = sorted(k for k, v in kwargs.items() if v is not None and k not in _INERT)
    if dropped:
        raise UnsupportedModel(
            f"{type(module).__name__}: received attention arguments {dropped}. Expected none "
            "beyond scale, sliding window and soft cap; this model can't be exported exactly."
        )
    if not isinstance(attention_mask, AskedMask):
        raise UnsupportedModel(
            f"{type(module).__name__}: the model makes its own attention mask, or none. Expected "
            "one from transformers' mask interface; this model can't be exported exactly."
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer in _recorder.present or 2 * layer >= len(_recorder.past):
        raise UnsupportedModel(
            f"{type(module).__name__}: received layer index {layer!r} twice or out of range. "
            "Expected one key/value cache a layer; shared or extra caches aren't carried."
        )
    _check_cache(type(module).__name__, _recorder.past[2 * layer], key, value)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    out = _recorder.attend(
        layer, query, key, value,
        scale=float(scaling), window=attention_mask.window, softcap=float(softcap or 0.0),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _check_cache(name: str, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Keys and values of one layer have the geometry that the configuration promised."""
    expected = (cache.shape[1], cache.shape[3])
    received = [(rows.shape[1], rows.shape[3]) for rows in (key, value)]
    if received != [expected, expected]:
        raise UnsupportedModel(
            f"{name}: received keys and values of (heads, head size) {received}. Expected "
            f"{expected} for both, in every layer, as the configuration says."
        )


def _mask(*, mask_function: Callable[..., torch.Tensor], config: Any, **_: Any) -> AskedMask:
    """The function that transformers calls for every kind of mask of the traced model."""
    if _recorder is None:
        raise BuildError("mask asked for outside a trace; call export.trace.trace_decoder.")
    return read_mask(mask_function, _recorder.max_context, config.model_type)


AttentionInterface.register(ATTENTION_NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _mask)


@contextlib.contextmanager
def recording(recorder: AttentionRecorder) -> Iterator[None]:
    global _recorder
    if _recorder is not None:
        raise BuildError("one trace at a time in a process: wait for the running one.")
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None
