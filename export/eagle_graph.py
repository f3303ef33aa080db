"""From an EAGLE head to its written graphs: `draft.onnx`, and `fuse.onnx` for EAGLE-3."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from engines.external_data import WeightStore, save
from engines.onnxruntime.lowering import lower

from .branch_tail import append_ranking
from .draft_tail import append_draft_sampling
from .draft_vocabulary import DraftVocabulary, QOver
from .eagle_head import EagleHead
from .eagle_trace import trace_fuse, trace_head
from .graphs import WrittenGraph, save_branch
from .portable import bind_weights, make_portable, simplify
from .precision import Precision, precision
from .trace import cache_spec

Share = Callable[[str], str | None]


def write_head(
    head: EagleHead,
    chosen: Precision,
    max_context: int,
    store: WeightStore,
    *,
    target_vocab: int,
    q_over: QOver = QOver.DRAFT,
    share: Share = lambda _: None,
    trees: bool = False,
) -> WrittenGraph:
    """share: keys in the store of weights that are the target's. trees: `branch.onnx` as well."""
    model = simplify(trace_head(head, max_context))
    bind_weights(model, head.load)
    lower(model, chosen.quantizer())
    append_draft_sampling(model, head.d2t, vocab_size=target_vocab, q_over=q_over)
    rounded = rounded_names(model)
    save(model, "draft", store, share=share)
    if trees:
        branch = make_portable(trace_head(head, max_context, trees=True))
        bind_weights(branch, head.load)
        lower(branch, chosen.quantizer())
        vocabulary = DraftVocabulary(target_size=target_vocab, size=head.vocab_size, d2t=head.d2t)
        append_ranking(branch, vocabulary)
        save_branch(branch, store, share)
    return WrittenGraph(
        cache=cache_spec(head.config, max_context), vocab_size=head.vocab_size, rounded=rounded
    )


def fuse_precision(asked: Precision) -> Precision:
    """8 bits at least: it reads states of very different scale side by side.

    On the example head 4 bits move what it gives by 13 %, 8 bits by 1 %.
    """
    return precision("int8") if asked.name == "int4" else asked


def write_fuse(head: EagleHead, asked: Precision, store: WeightStore) -> frozenset[str]:
    """Returns the names of the weights that were quantized."""
    model = simplify(trace_fuse(head))
    bind_weights(model, head.load)
    lower(model, fuse_precision(asked).quantizer())
    rounded = rounded_names(model)
    save(model, "fuse", store)
    return rounded


def rounded_names(model: ir.Model) -> frozenset[str]:
    """Weights behind `….codes` initializers; joined ones are named `a+b`."""
    codes = [n for n in model.graph.initializers if n.endswith((".codes", ".codes.table"))]
    names = (n.removesuffix(".table").removesuffix(".codes") for n in codes)
    return frozenset(name for joined in names for name in joined.split("+"))
