"""Every kind of drafter that a bundle may hold, and how it is loaded.

A new kind is a card in the manifest's `DraftCard`, a case here and one where it is built
(export/drafters.py); the type checker names the gaps, and the conformance tests ask for a bundle.
"""

from __future__ import annotations

from typing import Protocol, assert_never

from .buffers import RoundBuffers
from .contract import GraphSpec, draft_graph, eagle_graph, fuse_graph
from .draft_model import DraftModel
from .drafter import Drafter
from .eagle_drafter import EagleDrafter
from .errors import EngineError
from .executor import Executor
from .features import FeatureStore
from .manifest import DraftCard, EagleDraft, ModelDraft, NgramDraft
from .ngram_drafter import NgramDrafter
from .ngram_index import NgramIndex


class OpenGraph(Protocol):
    """Opens one of the bundle's graphs and checks it against its contract."""

    def __call__(self, name: str, spec: GraphSpec) -> Executor: ...


def load_drafter(
    card: DraftCard, open_graph: OpenGraph, buffers: RoundBuffers, features: FeatureStore | None
) -> Drafter:
    """The drafter that `card` describes, writing into `buffers`. Raises EngineError.

    features: the target's, where the card asks for them.
    """
    match card:
        case ModelDraft():
            cache = card.card.cache
            return DraftModel(open_graph("draft", draft_graph(cache)), cache, buffers)
        case NgramDraft():
            return NgramDrafter(NgramIndex(card.min_ngram, card.max_ngram), buffers)
        case EagleDraft():
            return _load_eagle(card, open_graph, buffers, features)
        case _:
            assert_never(card)


def _load_eagle(
    card: EagleDraft, open_graph: OpenGraph, buffers: RoundBuffers, features: FeatureStore | None
) -> Drafter:
    if features is None:
        raise EngineError("draft: received no features. Expected the target's; rebuild the bundle.")
    cache, fuse = card.card.cache, None
    if card.version == 3:
        fuse = open_graph("fuse", fuse_graph())
    head = open_graph("draft", eagle_graph(cache))
    return EagleDrafter(head, fuse, cache, features, buffers, card.state_width)
