"""Trace a Hugging Face decoder into one portable ONNX graph, without its weights.

The model itself is traced through transformers' public extension points: an attention function
and a mask function are registered, and the model is told to use them. Its code is never patched.
The registered attention writes keys and values into static caches (`TensorScatter`) and attends
over them under a mask made from per-row lengths (`Attention`), so that one graph serves prefill,
plain decoding and verification, rows of a batch may differ, and rollback is a smaller length.

An argument that the attention function does not carry is refused by name, never dropped: a soft
cap or a window that goes missing still gives fluent text. The window is read from the mask that
the model asks for (`export.masks`), because the mask is what its eager attention obeys.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from runtime.contract import CacheSpec
from runtime.errors import BuildError, UnsupportedModel

from .features import carried, refuse_unsupported
from .masks import AskedMask, read_mask

logger = logging.getLogger(__name__)

OPSET = 24
_NOISY = ("torch.onnx", "onnx_ir", "torch.export", "onnxscript")
ATTENTION_NAME = "outrider_static_cache"
# Keyword arguments of an attention call that change nothing in an inference graph.
_INERT = frozenset(
    {"dropout", "position_ids", "is_causal", "use_cache", "output_attentions", "cache_position",
     "output_hidden_states", "return_dict", "layer_idx", "head_mask", "logits_to_keep",
     "past_key_values", "position_embeddings", "output_router_logits", "num_items_in_batch",
     "sliding_window"}  # the mask has the window that counts
)  # fmt: skip


@dataclass(kw_only=True)
class AttentionRecorder:
    """The state of one trace: caches in, caches out, and the masks that layers share."""

    past_lengths: torch.Tensor  # [batch] i32
    max_context: int
    past: list[torch.Tensor]  # 2 a layer, [batch, kv_heads, max_context, head_dim]
    present: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, query_len: int | torch.SymInt, window: int | None) -> torch.Tensor:
        """Which cache rows each query row may see: [batch, 1, query_len, max_context] bool."""
        if window not in self.masks:
            position = self.past_lengths[:, None].long() + torch.arange(query_len)[None, :]
            position = position[:, None, :, None]
            column = torch.arange(self.max_context)
            seen = column <= position
            if window is not None:
                seen = seen & (column > position - window)
            self.masks[window] = seen
        return self.masks[window]

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
def _recording(recorder: AttentionRecorder) -> Iterator[None]:
    global _recorder
    if _recorder is not None:
        raise BuildError("one trace at a time in a process: wait for the running one.")
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None


class _StaticCacheDecoder(torch.nn.Module):
    """The traced signature: ids, lengths, rows to project and caches in; logits and caches out."""

    def __init__(self, model: torch.nn.Module, max_context: int) -> None:
        super().__init__()
        self.model = model
        self.max_context = max_context

    def forward(
        self,
        input_ids: torch.Tensor,  # [batch, query_len] i64
        past_lengths: torch.Tensor,  # [batch] i32
        logit_rows: torch.Tensor,  # [num_logits] i64
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        recorder = AttentionRecorder(
            past_lengths=past_lengths, max_context=self.max_context, past=list(past)
        )
        positions = past_lengths[:, None].long() + torch.arange(input_ids.shape[1])[None, :]
        with _recording(recorder):
            out = self.model(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),  # or transformers looks for packing
                position_ids=positions,
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        if len(recorder.present) * 2 != len(past):
            raise UnsupportedModel(
                f"{type(self.model).__name__}: {len(recorder.present)} of {len(past) // 2} layers "
                "went through the attention interface. Expected all: layers that keep another "
                "state than keys and values aren't carried."
            )
        return (out.logits, *(t for i in range(len(past) // 2) for t in recorder.present[i]))


def cache_spec(config: PretrainedConfig, max_context: int) -> CacheSpec:
    """Geometry of the KV cache of a decoder with this configuration."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return CacheSpec(
        layers=config.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=max_context,
    )


def trace_decoder(
    config: PretrainedConfig, max_context: int, *, head_rows: int | None = None
) -> ir.Model:
    """Trace a decoder from its configuration alone.

    head_rows: tokens that the output head knows, where they aren't the whole vocabulary.
    Returns an `onnx_ir` model whose inputs and outputs are those of
    `runtime.contract.target_graph`, but for `num_logits`, which is still `logit_rows`
    [num_logits] i64; initializers carry the names of the checkpoint's tensors and no data.
    Raises UnsupportedModel for a feature that the graph would not carry.
    """
    refuse_unsupported(config, max_context)
    config = carried(config, max_context)
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        model = _build(config, head_rows)
        program = _export(_StaticCacheDecoder(model, max_context), cache_spec(config, max_context))
    return _cleaned(program.model)


def _build(config: PretrainedConfig, head_rows: int | None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    if head_rows is not None:
        model.set_output_embeddings(torch.nn.Linear(config.hidden_size, head_rows, bias=False))
    model.set_attn_implementation(ATTENTION_NAME)
    _give_real_buffers(model, config)
    return model


def _give_real_buffers(model: torch.nn.Module, config: PretrainedConfig) -> None:
    """Rotary frequencies and the like aren't in the checkpoint: take them from a real model.

    A model with one layer of each kind has the same buffers outside its layers; buffers inside
    layers are matched by name without the layer index.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    small = copy.deepcopy(config)
    _shrink(small)
    with _disable_current_modes():
        real = dict(AutoModelForCausalLM.from_config(small, dtype=torch.float32).named_buffers())
    for name, _ in list(model.named_buffers()):
        source = _without_layer(name)
        if source not in real:
            raise UnsupportedModel(
                f"{type(model).__name__}: buffer {name} isn't in a smaller model of the same "
                "configuration; this model can't be traced without its weights."
            )
        owner, _, leaf = name.rpartition(".")
        persistent = leaf not in model.get_submodule(owner)._non_persistent_buffers_set
        model.get_submodule(owner).register_buffer(leaf, real[source], persistent=persistent)


def _shrink(config: PretrainedConfig) -> None:
    """Keep one layer of each kind: rotary frequencies may differ between kinds of layers."""
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    config.num_hidden_layers = max(1, len(kinds))
    if kinds:
        config.layer_types = kinds


def _without_layer(name: str) -> str:
    return ".".join("0" if part.isdigit() else part for part in name.split("."))


def _export(decoder: _StaticCacheDecoder, cache: CacheSpec) -> torch.onnx.ONNXProgram:
    batch, query_len, num_logits = 2, 4, 3
    past = tuple(torch.zeros(cache.shape(batch)) for _ in range(2 * cache.layers))
    args = (
        torch.ones((batch, query_len), dtype=torch.int64),
        torch.zeros((batch,), dtype=torch.int32),
        torch.arange(num_logits),
        *past,
    )
    rows = {0: torch.export.Dim("batch", min=1, max=1024)}
    ids = {**rows, 1: torch.export.Dim("query_len", min=1, max=cache.max_context)}
    kept = {0: torch.export.Dim("num_logits", min=1, max=cache.max_context)}
    program = torch.onnx.export(
        decoder,
        args,
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        verbose=False,
        dynamic_shapes=(ids, rows, kept, tuple(rows for _ in past)),
        input_names=["input_ids", "past_lengths", "logit_rows", *(s.name for s in cache.past())],
        output_names=["logits", *(s.name for s in cache.present())],
    )
    if program is None:
        raise BuildError("torch.onnx.export returned nothing; rerun with --verbose.")
    return program


def _cleaned(model: ir.Model) -> ir.Model:
    """Names as the checkpoint has them; weights lose their fake values, buffers keep theirs."""
    prefix = "model."
    for value in list(model.graph.initializers.values()):
        if value.name and value.name.startswith(prefix):
            value.name = value.name[len(prefix) :]
        if isinstance(getattr(value.const_value, "raw", None), FakeTensor):
            value.const_value = None
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's own messages concern its internals, not the user's model."""
    noisy = [logging.getLogger(name) for name in _NOISY]
    levels = [log.level for log in noisy]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for log in noisy:
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for log, level in zip(noisy, levels, strict=True):
                log.setLevel(level)
