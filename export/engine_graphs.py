"""From an open checkpoint to the graphs that engines are built from; their gates: engine_gates.

The graph is lowered twice from one trace: exactly, in f32, which is held against the eager model
with the same rounded weights; and strongly typed, which the engine is built from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from engines.external_data import WeightStore, save
from engines.tensorrt.lowering import lower, lower_exactly
from engines.tensorrt.weight_only import UnpackPass
from runtime.contract import CacheSpec
from runtime.errors import BuildError

from . import gates
from .branch_tail import append_ranking
from .checkpoint import Checkpoint
from .draft import Draft
from .draft_tail import append_draft_sampling, tail_model
from .draft_vocabulary import DraftVocabulary
from .engine_precision import EnginePrecision
from .graphs import WrittenGraph, _bound, rounded_weights
from .portable import fix_num_logits
from .trace import cache_spec

Array = np.ndarray
Finish = Callable[[ir.Model], None]


@dataclass(frozen=True, kw_only=True)
class LoweredGraph:
    """`path`: what the engine is built from; `exact`: the same in f32, where a gate will run it."""

    path: Path
    exact: Path | None
    rounded: frozenset[str]  # names of the weights that were quantized


@dataclass(frozen=True, kw_only=True)
class EngineGraph(WrittenGraph):
    """The same of a graph with caches."""

    path: Path
    exact: Path | None

    @property
    def exact_cache(self) -> CacheSpec:
        return replace(self.cache, dtype="float32")


def write_target_graph(
    checkpoint: Checkpoint,
    precision: EnginePrecision,
    max_context: int,
    scratch: Path,
    *,
    taps: Sequence[int] = (),
    trees: bool = False,
) -> EngineGraph:
    """taps: hidden states that a drafter reads. trees: it verifies trees."""
    model = _bound(checkpoint, max_context, taps=taps, trees=trees, moved=precision.moved)
    vocab = checkpoint.config.vocab_size
    return _written("target", model, checkpoint, precision, max_context, vocab, scratch)


def write_draft_graph(
    draft: Draft,
    precision: EnginePrecision,
    max_context: int,
    scratch: Path,
    *,
    target_vocab: int,
) -> EngineGraph:
    """The decoder, which gives logits; the exact graph samples from them. In one plan TensorRT-RTX
    1.7 can't have both: where a graph has a Loop and ten caches or more, its builder crashes.
    """
    head_rows = draft.vocab_size if draft.d2t is not None else None
    model = _bound(draft.checkpoint, max_context, head_rows=head_rows)
    fix_num_logits(model, 1)

    def sampling(lowered: ir.Model) -> None:
        append_draft_sampling(lowered, draft.d2t, vocab_size=target_vocab)

    return _written(
        "draft", model, draft.checkpoint, precision, max_context, draft.vocab_size, scratch,
        checked=sampling,
    )  # fmt: skip


def write_draft_tail(draft: Draft, scratch: Path, *, target_vocab: int) -> Path:
    tail = tail_model(draft.vocab_size, draft.d2t, vocab_size=target_vocab)
    return save(tail, "tail", WeightStore(directory=scratch))


def write_branch_graph(
    draft: Draft,
    precision: EnginePrecision,
    max_context: int,
    scratch: Path,
    *,
    vocabulary: DraftVocabulary,
) -> EngineGraph:
    """The draft over rows of a tree: what it ranks behind each (`export.branch_tail`)."""
    head_rows = draft.vocab_size if draft.d2t is not None else None
    model = _bound(draft.checkpoint, max_context, head_rows=head_rows, trees=True)
    return _written(
        "branch", model, draft.checkpoint, precision, max_context, draft.vocab_size, scratch,
        lambda lowered: append_ranking(lowered, vocabulary),
    )  # fmt: skip


def _written(
    name: str,
    model: ir.Model,
    checkpoint: Checkpoint,
    precision: EnginePrecision,
    max_context: int,
    vocab_size: int,
    scratch: Path,
    finish: Finish = lambda _: None,
    checked: Finish | None = None,
) -> EngineGraph:
    made = write_lowered(
        name, model, precision, scratch,
        rounded=lambda exact: rounded_weights(exact, checkpoint),
        eager_bytes=checkpoint.eager_bytes(),
        finish=finish,
        checked=checked,
    )  # fmt: skip
    cache = replace(cache_spec(checkpoint.config, max_context), dtype=precision.cache_dtype)
    return EngineGraph(
        cache=cache, vocab_size=vocab_size, rounded=made.rounded, path=made.path, exact=made.exact
    )


def write_lowered(
    name: str,
    model: ir.Model,  # portable, its weights bound
    precision: EnginePrecision,
    scratch: Path,
    *,
    rounded: Callable[[ir.Model], frozenset[str]],
    eager_bytes: int,
    finish: Finish = lambda _: None,
    checked: Finish | None = None,
) -> LoweredGraph:
    """Both graphs, the exact one where the eager model would fit beside it.

    rounded: names, as the checkpoint has them, of a lowered graph's quantized weights. finish: what
    is appended in f32, such as sampling; checked: to the exact graph, where that is more. Raises
    BuildError.
    """
    exact_path = None
    names: frozenset[str] = frozenset()
    if eager_bytes <= gates.available_bytes():
        exact = lower_exactly(model.clone(), precision.weights, precision.recipe_pass())
        names = rounded(exact)
        UnpackPass()(exact)
        (checked or finish)(exact)
        exact_path = save(exact, f"{name}.exact", WeightStore(directory=scratch))
    lower(model, precision.dtype, precision.weights, precision.recipe_pass())
    _check_quantized(name, model, precision)
    finish(model)
    path = save(model, name, WeightStore(directory=scratch))
    return LoweredGraph(path=path, exact=exact_path, rounded=names)


def _check_quantized(name: str, model: ir.Model, precision: EnginePrecision) -> None:
    """Layers whose rows are no whole blocks keep their type; where that is all, it was a mistake.

    Raises BuildError.
    """
    quantized = any(key.endswith((".codes", ".codes8")) for key in model.graph.initializers)
    if precision.weights is not None and not quantized:
        raise BuildError(
            f"--precision {precision.name}: received {name} in which no layer's input is a "
            f"multiple of {precision.weights.block}. Expected some; choose smaller blocks, or int8."
        )
