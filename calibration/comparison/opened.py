"""A bundle's graphs, each opened once, whoever runs them: sessions may run in several threads."""

from __future__ import annotations

from runtime.buffers import RoundBuffers
from runtime.bundle import Bundle
from runtime.contract import GraphSpec, draft_graph, target_graph
from runtime.draft_model import DraftModel
from runtime.drafters import load_head
from runtime.executor import EngineOptions, Executor
from runtime.features import FeatureStore
from runtime.manifest import EagleDraft, MedusaDraft, ModelDraft

from .drafting import BundleDrafter
from .graphs import TargetGraph


class OpenBundle:
    """What it gives has caches and buffers of its own, and shares the weights."""

    def __init__(self, bundle: Bundle, options: EngineOptions) -> None:
        self.bundle, self._options = bundle, options
        self._executors: dict[str, Executor] = {}

    def target(self) -> TargetGraph:
        spec = target_graph(self.bundle.manifest.target.cache)
        return TargetGraph(self.bundle, self._open("target", spec))

    def drafter(self, k: int, features: FeatureStore | None) -> BundleDrafter:
        """Of up to k drafts a round; features: of the target that a head drafts for."""
        manifest = self.bundle.manifest
        card, size = manifest.draft, manifest.draft_vocab_size
        buffers = RoundBuffers(k, manifest.target.vocab_size, size)
        if isinstance(card, ModelDraft):
            cache = card.card.cache
            model = DraftModel(self._open("draft", draft_graph(cache)), cache, buffers)
            return BundleDrafter(model, buffers, self.bundle)
        assert isinstance(card, EagleDraft | MedusaDraft)  # others aren't compared
        head = load_head(card, self._open, buffers, features)
        return BundleDrafter(head, buffers, self.bundle)

    def _open(self, name: str, spec: GraphSpec, *, sizes: dict[str, int] | None = None) -> Executor:
        if name not in self._executors:
            path = self.bundle.path / "onnx" / f"{name}.onnx"
            self._executors[name] = Executor.load(path, spec, self._options)
        return self._executors[name]
