"""An EAGLE head on its way into a bundle: its graphs, and what must hold of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from engines.external_data import WeightStore
from runtime.contract import CacheSpec
from runtime.manifest import EagleDraft, Gate, ModelCard

from . import gates
from .checkpoint import Checkpoint
from .draft_plan import PlanDefaults, States, WrittenDraft
from .draft_vocabulary import DraftVocabulary, QOver
from .eagle_gates import HeadWeights, head_parity
from .eagle_graph import fuse_precision, write_fuse, write_head
from .eagle_head import EagleHead, open_eagle
from .eagle_rows import HeadGraph, QShape, graph_rows, joined
from .features import refuse_unsupported
from .graphs import WrittenGraph
from .limits import draft_context
from .precision import Precision
from .taps import feature_width


@dataclass(frozen=True, kw_only=True)
class EagleDraftPlan(PlanDefaults):
    """`context`: rows of the head's cache; the head may know fewer positions than the target."""

    head: EagleHead
    target: Checkpoint
    precision: Precision
    context: int
    q_over: QOver

    @classmethod
    def open(
        cls,
        source: str,
        target: Checkpoint,
        *,
        target_context: int,
        precision: Precision,
        q_over: QOver = QOver.DRAFT,
    ) -> Self:
        """Raises CheckpointError where it doesn't fit the target, BuildError for its context."""
        head = open_eagle(source, target)
        context = draft_context(target_context, head.config, head.name)
        refuse_unsupported(head.config, context)
        return cls(
            head=head,
            target=target,
            precision=precision,
            context=context,
            q_over=q_over,
        )

    @property
    def name(self) -> str:
        return f"{self.head.name}, {self.precision.name}"

    @property
    def taps(self) -> tuple[int, ...]:
        """Of the target, as `export.taps` numbers them."""
        return self.head.taps or (self.target.config.num_hidden_layers,)

    @property
    def makes_trees(self) -> bool:
        return True

    def write(
        self, onnx: Path, store: WeightStore, *, target_vocab: int, trees: bool
    ) -> WrittenDraft:
        graph = write_head(
            self.head,
            self.precision,
            self.context,
            store,
            target_vocab=target_vocab,
            q_over=self.q_over,
            share=self._shared,
            trees=trees,
        )
        rounded = graph.rounded
        if self.head.version == 3:
            rounded |= write_fuse(self.head, self.precision, store)
        vocabulary = DraftVocabulary(
            target_size=target_vocab, size=graph.vocab_size, d2t=self.head.d2t
        )
        return WrittenDraft(
            card=self.card(graph.cache, self.precision),
            vocab_size=vocabulary.q_size(self.q_over),
            d2t=self.head.d2t if self.q_over is QOver.DRAFT else None,
            gates=lambda tokens, states: [
                self._parity(graph, vocabulary, rounded, onnx, tokens[: self.context], states)
            ],
        )

    def _shared(self, name: str) -> str | None:
        """The key of an embedding that the target lends, as the target's own graph has it."""
        base, _, part = name.partition(".weight")
        embedding = self.target.find("model.embed_tokens.weight")
        home = None if embedding is None else self.target.stored(embedding)
        if home is None or self.head.borrowed.get(f"{base}.weight") != home:
            return None
        return f"{home}:{self.precision.name}:{part.removesuffix('.table')}"

    def card(self, cache: CacheSpec, precision: gates.Rounding) -> EagleDraft:
        """What the manifest says of the head, whose caches and weights are as built."""
        shapes = self.head.shapes()
        own = (size for name, size in shapes.items() if name not in self.head.borrowed)
        return EagleDraft(
            version=self.head.version,
            card=ModelCard(
                name=self.head.name,
                model_type=self.head.config.model_type,
                revision=self.head.revision,
                sha256=self.head.sha256,
                parameters=sum(_count(size) for size in own),
                precision=precision.name,
                vocab_size=self.head.vocab_size,
                cache=cache,
            ),
            taps=self.taps,
            feature_width=feature_width(self.target.config, self.taps),
            state_width=self.head.config.hidden_size,
        )

    def _parity(
        self,
        graph: WrittenGraph,
        vocabulary: DraftVocabulary,
        rounded: frozenset[str],
        onnx: Path,
        tokens: Sequence[int],
        states: States,
    ) -> Gate:
        shape = QShape(
            size=vocabulary.q_size(self.q_over),
            columns=None if self.q_over is QOver.DRAFT else vocabulary.target_ids(),
        )
        features = states(tokens)
        return head_parity(
            self.head,
            HeadWeights(layer=self.precision, fuse=fuse_precision(self.precision), rounded=rounded),
            lambda: self._rows(graph, onnx, tokens, features, shape),
            list(tokens),
            features,
        )

    def _rows(
        self,
        graph: WrittenGraph,
        onnx: Path,
        tokens: Sequence[int],
        features: np.ndarray,
        shape: QShape,
    ) -> np.ndarray:
        """Of the written graphs in f32 arithmetic."""
        states, width = np.asarray(features[None], np.float32), self.head.config.hidden_size
        if self.head.version == 3:
            with gates.exact_arithmetic(onnx / "fuse.onnx") as variant:
                states = joined(variant, states, width)
        with gates.exact_arithmetic(onnx / "draft.onnx") as variant:
            head = HeadGraph(variant, graph.cache, width, shape.size)
            return graph_rows(head, tokens, states, shape)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
