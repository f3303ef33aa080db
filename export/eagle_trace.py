"""Trace an EAGLE head, without its weights, through the static caches that decoders use."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.contract import CacheSpec
from runtime.errors import BuildError

from .eagle_head import EagleHead
from .eagle_module import EagleModule, FuseModule, make_rotary, with_attention
from .quiet import quiet
from .static_attention import ATTENTION_NAME, AttentionRecorder, Tree, recording
from .torch_onnx import to_onnx
from .trace import cache_spec, cleaned, example_tree

BATCH, ROWS = 2, 4  # of the example inputs; both axes are symbolic


class _StaticCacheHead(torch.nn.Module):
    """The traced signature: ids, states, lengths and caches in; logits, last state, caches out."""

    def __init__(self, model: EagleModule, max_context: int) -> None:
        super().__init__()
        self.model = model
        self.max_context = max_context

    def forward(
        self,
        input_ids: torch.Tensor,  # [batch, query_len] i64
        states: torch.Tensor,  # [batch, query_len, H]
        past_lengths: torch.Tensor,  # [batch] i32
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        recorder = AttentionRecorder(
            past_lengths=past_lengths, max_context=self.max_context, past=list(past)
        )
        positions = past_lengths[:, None].long() + torch.arange(input_ids.shape[1])[None, :]
        with recording(recorder):
            logits, own = self.model(input_ids, states, positions)
        if len(recorder.present) != 1:
            raise BuildError("EAGLE: its layer didn't go through the attention interface; retrace.")
        return (logits, own[:, -1:], *recorder.present[0])


class _TreeHead(_StaticCacheHead):
    """The same over rows of a tree, with the logits and states of those that are asked for."""

    def forward(
        self,
        input_ids: torch.Tensor,  # [batch, query_len] i64
        states: torch.Tensor,  # [batch, query_len, H]
        past_lengths: torch.Tensor,  # [batch] i32
        logit_rows: torch.Tensor,  # [num_logits] i64
        depths: torch.Tensor,  # [batch, tree_len] i64
        visible: torch.Tensor,  # [batch, query_len, tree_len] bool
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        recorder = AttentionRecorder(
            past_lengths=past_lengths,
            max_context=self.max_context,
            past=list(past),
            tree=Tree(depths=depths, visible=visible),
        )
        positions = recorder.positions(input_ids.shape[1])
        with recording(recorder):
            logits, own = self.model(input_ids, states, positions, logit_rows)
        return (logits, own[:, logit_rows], *recorder.present[0])


def trace_head(head: EagleHead, max_context: int, *, trees: bool = False) -> ir.Model:
    """As `runtime.contract.eagle_graph`, but for sampling: `logits` [batch, 1, D] f32 instead.

    trees: as `eagle_branch_graph`, with `logits` [batch, num_logits, D] and `logit_rows`
    [num_logits] i64. Initializers carry the canonical names and no data.
    """
    traced = with_attention(head, ATTENTION_NAME)
    rotary = make_rotary(head.config)  # real frequencies: they aren't in the checkpoint
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        module = EagleModule(traced, rotary).eval()
        if trees:
            program = _export_tree(_TreeHead(module, max_context), head, max_context)
        else:
            program = _export(_StaticCacheHead(module, max_context), head, max_context)
    return cleaned(program.model)


def trace_fuse(head: EagleHead) -> ir.Model:
    """As `runtime.contract.fuse_graph`; initializers carry the canonical names and no data."""
    axes = {0: _batch(), 1: torch.export.Dim("query_len", min=1, max=1 << 20)}
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        module = FuseModule(head).eval()
        program = to_onnx(
            module,
            (torch.zeros(BATCH, ROWS, module.width),),
            (axes,),
            inputs=["features"],
            outputs=["states"],
            name=head.name,
        )
    return cleaned(program.model)


def _export(module: _StaticCacheHead, head: EagleHead, max_context: int) -> Any:
    cache: CacheSpec = cache_spec(head.config, max_context)
    past = tuple(torch.zeros(cache.shape(BATCH)) for _ in range(2))
    args = (
        torch.ones((BATCH, ROWS), dtype=torch.int64),
        torch.zeros((BATCH, ROWS, head.config.hidden_size)),
        torch.zeros((BATCH,), dtype=torch.int32),
        *past,
    )
    rows = {0: _batch()}
    each = {**rows, 1: torch.export.Dim("query_len", min=1, max=max_context)}
    return to_onnx(
        module,
        args,
        (each, each, rows, tuple(rows for _ in past)),
        inputs=["input_ids", "states", "past_lengths", *(s.name for s in cache.past())],
        outputs=["logits", "next_state", *(s.name for s in cache.present())],
        name=head.name,
    )


def _export_tree(module: _TreeHead, head: EagleHead, max_context: int) -> Any:
    cache: CacheSpec = cache_spec(head.config, max_context)
    past = tuple(torch.zeros(cache.shape(BATCH)) for _ in range(2))
    args = (
        torch.ones((BATCH, ROWS), dtype=torch.int64),
        torch.zeros((BATCH, ROWS, head.config.hidden_size)),
        torch.zeros((BATCH,), dtype=torch.int32),
        torch.arange(ROWS - 1),
        *example_tree(BATCH, ROWS),
        *past,
    )
    rows = {0: _batch()}
    each = {**rows, 1: torch.export.Dim("query_len", min=1, max=max_context)}
    kept = {0: torch.export.Dim("num_logits", min=1, max=max_context)}
    columns = torch.export.Dim("tree_len", min=1, max=max_context)
    tree = ({**rows, 1: columns}, {**each, 2: columns})
    return to_onnx(
        module,
        args,
        (each, each, rows, kept, *tree, tuple(rows for _ in past)),
        inputs=[
            "input_ids",
            "states",
            "past_lengths",
            "logit_rows",
            "depths",
            "visible",
            *(s.name for s in cache.past()),
        ],
        outputs=["logits", "next_state", *(s.name for s in cache.present())],
        name=head.name,
    )


def _batch() -> Any:
    return torch.export.Dim("batch", min=1, max=1024)
