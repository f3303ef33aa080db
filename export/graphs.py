"""From an open checkpoint to a written backend graph: trace, bind, lower, save.

checkpoint ─ trace ─▶ portable ─ lower ─▶ backend graph ─ quantized as it is written ─▶ onnx/
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from transformers import PretrainedConfig

from engines.external_data import WeightStore, save
from engines.onnxruntime.lowering import lower, make_rows_alike, quantize_caches
from runtime.contract import CacheSpec

from .accept_graph import accept_model
from .branch_tail import append_ranking
from .checkpoint import Checkpoint
from .draft import Draft
from .draft_tail import append_draft_sampling
from .draft_vocabulary import DraftVocabulary, QOver
from .names import match_names
from .portable import bind_weights, fix_num_logits, make_portable, weight_shapes
from .precision import Precision
from .trace import cache_spec, trace_decoder

logger = logging.getLogger(__name__)

Share = Callable[[str], str | None]
Moved = Callable[[str, np.ndarray], np.ndarray]


def _unmoved(_name: str, values: np.ndarray) -> np.ndarray:
    return values


@dataclass(frozen=True, kw_only=True)
class WrittenGraph:
    cache: CacheSpec
    vocab_size: int
    rounded: frozenset[str]  # checkpoint names of the weights that were quantized


def write_target(
    checkpoint: Checkpoint,
    precision: Precision,
    max_context: int,
    store: WeightStore,
    *,
    taps: Sequence[int] = (),
    trees: bool = False,
) -> WrittenGraph:
    """Trace, lower and write `target.onnx`; weights are read and written one at a time.

    taps: hidden states that a drafter reads. trees: it verifies trees.
    """
    model = _bound(checkpoint, max_context, taps=taps, trees=trees, moved=precision.moved)
    lower(model, precision.quantizer(), precision.qdq())
    cache = cache_spec(checkpoint.config, max_context)
    if precision.caches is not None:
        quantize_caches(model, precision.caches)
        cache = replace(cache, dtype="int8")
    elif precision.rows_alike:
        make_rows_alike(model)
    rounded = rounded_weights(model, checkpoint)
    embedding = checkpoint.find("model.embed_tokens.weight")
    home = checkpoint.stored(embedding) if embedding is not None else None
    save(model, "target", store, share=_embedding_keys(checkpoint, home, precision))
    return WrittenGraph(
        cache=cache,
        vocab_size=checkpoint.config.vocab_size,
        rounded=rounded,
    )


def write_draft(
    draft: Draft,
    precision: Precision,
    max_context: int,
    store: WeightStore,
    *,
    target_vocab: int,
    q_over: QOver = QOver.DRAFT,
    trees: bool = False,
) -> WrittenGraph:
    """The same for `draft.onnx`, with sampling inside; a shared embedding isn't written again.

    trees: `branch.onnx` as well, over the same weights.
    """
    checkpoint = draft.checkpoint
    head_rows = draft.vocab_size if draft.d2t is not None else None
    model = _bound(checkpoint, max_context, head_rows=head_rows)
    fix_num_logits(model, 1)
    lower(model, precision.quantizer())
    append_draft_sampling(model, draft.d2t, vocab_size=target_vocab, q_over=q_over)
    rounded = rounded_weights(model, checkpoint)
    home = draft.borrowed_embedding
    share = _embedding_keys(checkpoint, home, precision)
    save(model, "draft", store, share=share)
    if trees:
        branch = _bound(checkpoint, max_context, head_rows=head_rows, trees=True)
        lower(branch, precision.quantizer())
        size = draft.vocab_size
        append_ranking(branch, DraftVocabulary(target_size=target_vocab, size=size, d2t=draft.d2t))
        save_branch(branch, store, share)
    return WrittenGraph(
        cache=cache_spec(checkpoint.config, max_context),
        vocab_size=draft.vocab_size,
        rounded=rounded,
    )


def save_branch(model: ir.Model, store: WeightStore, share: Share) -> None:
    """Write `branch.onnx`, whose weights are `draft.onnx`'s."""
    save(model, "branch", store, share=lambda name: share(name) or f"draft.data:{name}")


def write_accept(
    vocab_size: int, draft_vocab_size: int | None, d2t: np.ndarray | None, store: WeightStore
) -> None:
    save(accept_model(vocab_size, d2t, draft_vocab_size=draft_vocab_size), "accept", store)


def _bound(
    checkpoint: Checkpoint,
    max_context: int,
    *,
    head_rows: int | None = None,
    taps: Sequence[int] = (),
    trees: bool = False,
    moved: Moved = _unmoved,
) -> ir.Model:
    """moved: what becomes of a tensor, by the graph's name of it, before it is rounded."""
    config: PretrainedConfig = checkpoint.config
    traced = trace_decoder(config, max_context, head_rows=head_rows, taps=taps, trees=trees)
    model = make_portable(traced)
    names = match_names(checkpoint, weight_shapes(model))
    graph_name = {stored: name for name, stored in names.items()}

    def load(stored: str) -> np.ndarray:
        return moved(graph_name.get(stored, stored), checkpoint.load(stored))

    bind_weights(model, load, names)
    return model


def rounded_weights(model: ir.Model, checkpoint: Checkpoint) -> frozenset[str]:
    """Weights behind `….codes` initializers; joined ones are named `a+b`.

    A graph knows a tied embedding by its head's name alone: a table of it stands for both.
    """
    codes = [n for n in model.graph.initializers if n.endswith((".codes", ".codes8"))]
    names = {name for n in codes for name in n.rpartition(".")[0].split("+")}
    tables = [n for n in model.graph.initializers if n.endswith(".codes.table")]
    embedded = {checkpoint.stored(n.removesuffix(".codes.table")) for n in tables}
    twins = {n for n in checkpoint.names() if checkpoint.stored(n) in embedded}
    return frozenset(names | twins)


def _embedding_keys(checkpoint: Checkpoint, home: str | None, precision: Precision) -> Share:
    """Keys that are equal for equal bytes in two graphs of a bundle: those of one embedding.

    home: the target's name of the embedding, or None for a model whose embedding is its own.
    """
    embedding = checkpoint.find("model.embed_tokens.weight")
    if embedding is None or home is None:
        return lambda _: None
    stored = checkpoint.stored(embedding)

    def key(name: str) -> str | None:
        base, _, part = name.partition(".weight")
        weight = checkpoint.find(f"{base}.weight")
        if weight is None or checkpoint.stored(weight) != stored:
            return None
        return f"{home}:{precision.name}:{part.removesuffix('.table')}"

    return key
