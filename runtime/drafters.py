"""Every kind of drafter that a bundle may hold, and how it is loaded.

A new kind is a card in the manifest's `DraftCard`, a case here and one where it is built
(export/drafters.py); the type checker names the gaps, and the conformance tests ask for a bundle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, assert_never

from .buffers import RoundBuffers
from .contract import GraphSpec, draft_graph
from .draft_model import DraftModel
from .drafter import Drafter
from .executor import Executor
from .manifest import (
    DRAFT_TOKENIZER,
    DraftCard,
    ModelCard,
    ModelDraft,
    NgramDraft,
    NgramPlusDraft,
    RetokenizedDraft,
)
from .ngram_drafter import NgramDrafter
from .ngram_index import NgramIndex
from .ngram_plus import NgramPlus
from .retokenized_drafter import RetokenizedDrafter
from .tokenizer import Tokenizer


class OpenGraph(Protocol):
    """Opens one of the bundle's graphs and checks it against its contract.

    sizes: of symbolic axes, where they aren't the target's.
    """

    def __call__(self, name: str, spec: GraphSpec, *, sizes: dict[str, int] = ...) -> Executor: ...


def load_drafter(
    card: DraftCard, open_graph: OpenGraph, buffers: RoundBuffers, path: Path
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
        case NgramPlusDraft():
            lookup = load_drafter(card.ngram, open_graph, buffers, path)
            return NgramPlus(lookup, load_drafter(card.other, open_graph, buffers, path), buffers)
        case RetokenizedDraft():
            return _retokenized(card.card, open_graph, buffers, path)
        case _:
            assert_never(card)


def _retokenized(
    card: ModelCard, open_graph: OpenGraph, buffers: RoundBuffers, path: Path
) -> RetokenizedDrafter:
    sizes = {"vocab": card.vocab_size, "draft_vocab": card.vocab_size}
    graph = open_graph("draft", draft_graph(card.cache), sizes=sizes)
    own = RoundBuffers(1, card.vocab_size, card.vocab_size)
    model = DraftModel(graph, card.cache, own)
    target, draft = Tokenizer(path / "tokenizer.json"), Tokenizer(path / DRAFT_TOKENIZER)
    return RetokenizedDrafter(model, own, target, draft, buffers)
