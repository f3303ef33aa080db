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

import copy
from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from runtime.contract import CacheSpec
from runtime.errors import UnsupportedModel

from .features import carried, refuse_unsupported
from .quiet import quiet
from .static_attention import ATTENTION_NAME, AttentionRecorder, Tree, recording
from .taps import Taps
from .torch_onnx import to_onnx


class _StaticCacheDecoder(torch.nn.Module):
    """The traced signature: ids, lengths, rows to project and caches in; logits and caches out,
    and the states at the taps, if there are any."""

    def __init__(
        self,
        model: torch.nn.Module,
        max_context: int,
        taps: Sequence[int] = (),
        *,
        trees: bool = False,
    ) -> None:
        super().__init__()
        self.trees = trees
        self.model = model
        self.max_context = max_context
        self.taps = Taps(model, taps) if taps else None

    def forward(
        self,
        input_ids: torch.Tensor,  # [batch, query_len] i64
        past_lengths: torch.Tensor,  # [batch] i32
        logit_rows: torch.Tensor,  # [num_logits] i64
        *more: torch.Tensor,  # depths and visible, where it verifies trees; the caches
    ) -> tuple[torch.Tensor, ...]:
        tree, past = (
            (Tree(depths=more[0], visible=more[1]), more[2:]) if self.trees else (None, more)
        )
        recorder = AttentionRecorder(
            past_lengths=past_lengths, max_context=self.max_context, past=list(past), tree=tree
        )
        positions = recorder.positions(input_ids.shape[1])
        with recording(recorder):
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
        present = (t for i in range(len(past) // 2) for t in recorder.present[i])
        return (out.logits, *present, *((self.taps.joined(),) if self.taps else ()))


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
    config: PretrainedConfig,
    max_context: int,
    *,
    head_rows: int | None = None,
    taps: Sequence[int] = (),
    trees: bool = False,
) -> ir.Model:
    """Trace a decoder from its configuration alone.

    head_rows: tokens that the output head knows, where they aren't the whole vocabulary.
    taps: hidden states to give as `features`, as `export.taps` numbers them.
    trees: whether the query rows may be a tree, told by `depths` and `visible`.
    Returns an `onnx_ir` model whose inputs and outputs are those of
    `runtime.contract.target_graph`, but for `num_logits`, which is still `logit_rows`
    [num_logits] i64; initializers carry the names of the checkpoint's tensors and no data.
    Raises UnsupportedModel for a feature that the graph would not carry.
    """
    refuse_unsupported(config, max_context)
    config = carried(config)
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        model = _build(config, head_rows)
        decoder = _StaticCacheDecoder(model, max_context, taps, trees=trees)
        program = _export(decoder, cache_spec(config, max_context))
    return cleaned(program.model)


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
        *(example_tree(batch, query_len) if decoder.trees else ()),
        *past,
    )
    rows = {0: torch.export.Dim("batch", min=1, max=1024)}
    ids = {**rows, 1: torch.export.Dim("query_len", min=1, max=cache.max_context)}
    kept = {0: torch.export.Dim("num_logits", min=1, max=cache.max_context)}
    columns = torch.export.Dim("tree_len", min=1, max=cache.max_context)
    tree = ({**rows, 1: columns}, {**ids, 2: columns}) if decoder.trees else ()
    return to_onnx(
        decoder,
        args,
        (ids, rows, kept, (*tree, *(rows for _ in past))),
        inputs=[
            "input_ids",
            "past_lengths",
            "logit_rows",
            *(["depths", "visible"] if decoder.trees else []),
            *(s.name for s in cache.past()),
        ],
        outputs=[
            "logits",
            *(s.name for s in cache.present()),
            *(["features"] if decoder.taps else []),
        ],
        name=type(decoder.model).__name__,
    )


def example_tree(batch: int, query_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """With columns in front of the query, or the exporter takes both axes for one."""
    columns = query_len + 2
    return (
        torch.zeros((batch, columns), dtype=torch.int64),
        torch.ones((batch, query_len, columns), dtype=torch.bool),
    )


def cleaned(model: ir.Model) -> ir.Model:
    """Names as the checkpoint has them; weights lose their fake values, buffers keep theirs."""
    prefix = "model."
    for value in list(model.graph.initializers.values()):
        if value.name and value.name.startswith(prefix):
            value.name = value.name[len(prefix) :]
        if isinstance(getattr(value.const_value, "raw", None), FakeTensor):
            value.const_value = None
    return model
