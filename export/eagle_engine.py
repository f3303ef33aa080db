"""From an EAGLE head to the graphs that its engines are built from.

As `export.eagle_graph` for ONNX Runtime: the same traces, lowered for TensorRT. The head has no
transposed or joined weights there, so each parameter that is rounded goes by its own name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx_ir as ir

from .branch_tail import append_ranking
from .draft_tail import append_draft_sampling
from .draft_vocabulary import DraftVocabulary
from .eagle_gates import eager_bytes
from .eagle_graph import rounded_names
from .eagle_head import EagleHead
from .eagle_trace import trace_fuse, trace_head
from .engine_graphs import EngineGraph, Finish, LoweredGraph, write_lowered
from .engine_precision import EnginePrecision, engine_precision
from .portable import bind_weights, make_portable, simplify
from .trace import cache_spec


@dataclass(frozen=True, kw_only=True)
class EagleGraphs:
    """fuse: of EAGLE-3. branch: where the bundle makes trees."""

    head: EngineGraph
    fuse: LoweredGraph | None
    branch: EngineGraph | None


def write_eagle_graphs(
    head: EagleHead,
    precision: EnginePrecision,
    max_context: int,
    scratch: Path,
    *,
    vocabulary: DraftVocabulary,
    trees: bool,
) -> EagleGraphs:
    """Raises BuildError."""
    size = vocabulary.target_size
    write = partial(_write, head, precision, max_context, scratch)
    return EagleGraphs(
        head=write(
            "draft",
            simplify(trace_head(head, max_context)),
            lambda lowered: append_draft_sampling(lowered, head.d2t, vocab_size=size),
        ),
        fuse=_write_fuse(head, precision, scratch) if head.version == 3 else None,
        branch=write(
            "branch",
            make_portable(trace_head(head, max_context, trees=True)),
            lambda lowered: append_ranking(lowered, vocabulary),
        )
        if trees
        else None,
    )


def fuse_engine_precision(asked: EnginePrecision) -> EnginePrecision:
    """8 bits at least, as `export.eagle_graph.fuse_precision` has it."""
    narrow = asked.weights is not None and asked.weights.kind in ("int4", "fp4")
    suffix = "" if asked.activations == "fp16" else f"-{asked.activations}"
    return engine_precision(f"int8{suffix}") if narrow else asked


def _write(
    head: EagleHead,
    precision: EnginePrecision,
    max_context: int,
    scratch: Path,
    name: str,
    model: ir.Model,
    finish: Finish,
) -> EngineGraph:
    bind_weights(model, head.load)
    made = write_lowered(
        name, model, precision, scratch,
        rounded=rounded_names, eager_bytes=eager_bytes(head), finish=finish,
    )  # fmt: skip
    cache = replace(cache_spec(head.config, max_context), dtype=precision.cache_dtype)
    return EngineGraph(
        cache=cache,
        vocab_size=head.vocab_size,
        rounded=made.rounded,
        path=made.path,
        exact=made.exact,
    )


def _write_fuse(head: EagleHead, precision: EnginePrecision, scratch: Path) -> LoweredGraph:
    model = simplify(trace_fuse(head))
    bind_weights(model, head.load)
    return write_lowered(
        "fuse", model, fuse_engine_precision(precision), scratch,
        rounded=rounded_names, eager_bytes=eager_bytes(head),
    )  # fmt: skip
