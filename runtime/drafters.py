"""Every kind of drafter that a bundle may hold, and how it is loaded.

A new kind is a card in the manifest's `DraftCard`, a case here and one where it is built
(export/drafters.py); the type checker names the gaps, and the conformance tests ask for a bundle.
"""

from __future__ import annotations

from typing import Protocol, assert_never

from .buffers import RoundBuffers
from .contract import GraphSpec, draft_graph
from .draft_model import DraftModel
from .drafter import Drafter
from .executor import Executor
from .manifest import DraftCard, ModelDraft, NgramDraft, NgramPlusDraft
from .ngram_drafter import NgramDrafter
from .ngram_index import NgramIndex
from .ngram_plus import NgramPlus


class OpenGraph(Protocol):
    """Opens one of the bundle's graphs and checks it against its contract."""

    def __call__(self, name: str, spec: GraphSpec) -> Executor: ...


def load_drafter(card: DraftCard, open_graph: OpenGraph, buffers: RoundBuffers) -> Drafter:
    """The drafter that `card` describes, writing into `buffers`. Raises EngineError."""
    match card:
        case ModelDraft():
            cache = card.card.cache
            return DraftModel(open_graph("draft", draft_graph(cache)), cache, buffers)
        case NgramDraft():
            return NgramDrafter(NgramIndex(card.min_ngram, card.max_ngram), buffers)
        case NgramPlusDraft():
            lookup = load_drafter(card.ngram, open_graph, buffers)
            return NgramPlus(lookup, load_drafter(card.other, open_graph, buffers), buffers)
        case _:
            assert_never(card)
