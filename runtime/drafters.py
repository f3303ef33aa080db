"""Every kind of drafter that a bundle may hold, and how it is loaded.

A new kind is a card in the manifest's `DraftCard`, a case here and one where it is built
(export/drafters.py); the type checker names the gaps, and the conformance tests ask for a bundle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, assert_never

from .buffers import RoundBuffers
from .contract import (
    SKIP_LAYERS,
    GraphSpec,
    TensorSpec,
    draft_graph,
    eagle_graph,
    fuse_graph,
    heads_graph,
    tail_graph,
)
from .draft_model import DraftModel
from .drafter import Drafter
from .eagle_drafter import EagleDrafter
from .errors import EngineError
from .executor import Executor
from .features import FeatureStore
from .layer_skip import LayerSkip
from .manifest import (
    DRAFT_TOKENIZER,
    DraftCard,
    EagleDraft,
    LayerSkipDraft,
    MedusaDraft,
    ModelCard,
    ModelDraft,
    NgramDraft,
    NgramPlusDraft,
    RetokenizedDraft,
)
from .medusa_drafter import MedusaDrafter
from .ngram_drafter import NgramDrafter
from .ngram_index import NgramIndex
from .ngram_plus import NgramPlus
from .retokenized_drafter import RetokenizedDrafter
from .target import TargetStep
from .tokenizer import Tokenizer


class OpenGraph(Protocol):
    """Opens one of the bundle's graphs and checks it against its contract.

    sizes: of symbolic axes, where they aren't the target's.
    """

    def __call__(self, name: str, spec: GraphSpec, *, sizes: dict[str, int] = ...) -> Executor: ...


def load_drafter(
    card: DraftCard,
    open_graph: OpenGraph,
    buffers: RoundBuffers,
    target: TargetStep,
    path: Path,
) -> Drafter:
    """The drafter that `card` of the bundle at `path` describes, writing into `buffers`.

    Raises EngineError and BundleError.
    """
    match card:
        case ModelDraft():
            cache = card.card.cache
            return DraftModel(open_graph("draft", draft_graph(cache)), cache, buffers)
        case NgramDraft():
            return NgramDrafter(NgramIndex(card.min_ngram, card.max_ngram), buffers)
        case EagleDraft() | MedusaDraft():
            return load_head(card, open_graph, buffers, target.features)
        case LayerSkipDraft():
            return LayerSkip(target, open_graph("tail", tail_graph()), buffers)
        case NgramPlusDraft():
            lookup = load_drafter(card.ngram, open_graph, buffers, target, path)
            other = load_drafter(card.other, open_graph, buffers, target, path)
            return NgramPlus(lookup, other)
        case RetokenizedDraft():
            return _retokenized(card.card, open_graph, buffers, path)
        case _:
            assert_never(card)


def load_head(
    card: EagleDraft | MedusaDraft,
    open_graph: OpenGraph,
    buffers: RoundBuffers,
    features: FeatureStore | None,
) -> Drafter:
    """A drafter that reads the target's hidden states. Raises EngineError."""
    if features is None:
        raise EngineError("draft: received no features. Expected the target's; rebuild the bundle.")
    if isinstance(card, MedusaDraft):
        heads, tail = open_graph("heads", heads_graph()), open_graph("tail", tail_graph())
        return MedusaDrafter(heads, tail, features, buffers, card.num_heads)
    fuse = open_graph("fuse", fuse_graph()) if "fuse" in card.graphs else None
    cache = card.card.cache
    head = open_graph("draft", eagle_graph(cache))
    return EagleDrafter(head, fuse, cache, features, buffers, card.state_width)


def target_switches(card: DraftCard | None) -> tuple[TensorSpec, ...]:
    """What a drafter asks of the target's graph besides the usual inputs."""
    return (SKIP_LAYERS,) if isinstance(card, LayerSkipDraft) else ()


def _retokenized(
    card: ModelCard, open_graph: OpenGraph, buffers: RoundBuffers, path: Path
) -> RetokenizedDrafter:
    sizes = {"vocab": card.vocab_size, "draft_vocab": card.vocab_size}
    graph = open_graph("draft", draft_graph(card.cache), sizes=sizes)
    own = RoundBuffers(1, card.vocab_size, card.vocab_size)
    model = DraftModel(graph, card.cache, own)
    target, draft = Tokenizer(path / "tokenizer.json"), Tokenizer(path / DRAFT_TOKENIZER)
    return RetokenizedDrafter(model, own, target, draft, buffers)
