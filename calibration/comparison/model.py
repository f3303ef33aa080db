"""Which graph of a bundle is looked into: its target's or its draft's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.bundle import Bundle
from runtime.contract import CacheSpec, GraphSpec, draft_graph, target_graph


@dataclass(frozen=True, kw_only=True)
class Model:
    """Target or draft of a bundle, as its contract describes it."""

    path: Path
    spec: GraphSpec
    cache: CacheSpec
    vocab: int  # of what it gives
    sizes: Mapping[str, int]  # of its inputs' axes

    @classmethod
    def target(cls, bundle: Bundle) -> Model:
        card = bundle.manifest.target
        path, spec = bundle.model_path("target"), target_graph(card.cache)
        sizes = {"batch": 1, "vocab": card.vocab_size}
        return cls(path=path, spec=spec, cache=card.cache, vocab=card.vocab_size, sizes=sizes)

    @classmethod
    def draft(cls, bundle: Bundle) -> Model:
        card = bundle.manifest.draft_model
        assert card is not None  # sides without a draft are refused before
        path, spec = bundle.model_path("draft"), draft_graph(card.cache)
        sizes = {"batch": 1, "vocab": bundle.manifest.target.vocab_size}
        size = bundle.manifest.draft_vocab_size
        return cls(path=path, spec=spec, cache=card.cache, vocab=size, sizes=sizes)
