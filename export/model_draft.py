"""A draft model on its way into a bundle: one graph with its own cache and sampling inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from engines.external_data import WeightStore
from runtime.manifest import Gate, ModelCard, ModelDraft

from . import gates
from .checkpoint import Checkpoint
from .draft import Draft, open_draft
from .draft_plan import PlanDefaults, WrittenDraft
from .draft_vocabulary import DraftVocabulary, QOver
from .features import refuse_unproven, refuse_unsupported
from .gate_graph import DraftGateGraph
from .graphs import WrittenGraph, write_draft
from .limits import draft_context
from .model_card import model_card
from .precision import Precision


@dataclass(frozen=True, kw_only=True)
class ModelDraftPlan(PlanDefaults):
    """`context`: rows of its cache; the model may know fewer positions than the target."""

    draft: Draft
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
        draft = open_draft(source, target)
        return cls.of(draft, target_context=target_context, precision=precision, q_over=q_over)

    @classmethod
    def of(
        cls,
        draft: Draft,
        *,
        target_context: int,
        precision: Precision,
        q_over: QOver = QOver.DRAFT,
    ) -> Self:
        """Raises CheckpointError for a model that isn't carried, BuildError for its context."""
        checkpoint = draft.checkpoint
        context = draft_context(target_context, checkpoint.config, checkpoint.name)
        refuse_unsupported(checkpoint.config, context)
        refuse_unproven(checkpoint.config, checkpoint.eager_bytes(), gates.available_bytes())
        return cls(draft=draft, precision=precision, context=context, q_over=q_over)

    @property
    def name(self) -> str:
        return f"{self.draft.checkpoint.name}, {self.precision.name}"

    @property
    def makes_trees(self) -> bool:
        return True

    def write(
        self, onnx: Path, store: WeightStore, *, target_vocab: int, trees: bool
    ) -> WrittenDraft:
        graph = write_draft(
            self.draft,
            self.precision,
            self.context,
            store,
            target_vocab=target_vocab,
            q_over=self.q_over,
            trees=trees,
        )
        over_draft = self.q_over is QOver.DRAFT
        vocabulary = DraftVocabulary(
            target_size=target_vocab, size=graph.vocab_size, d2t=self.draft.d2t
        )
        return WrittenDraft(
            card=ModelDraft(card=self._card(graph)),
            vocab_size=vocabulary.q_size(self.q_over),
            d2t=self.draft.d2t if over_draft else None,
            gates=lambda tokens, _: [self._parity(graph, vocabulary, onnx / "draft.onnx", tokens)],
        )

    def _card(self, graph: WrittenGraph) -> ModelCard:
        return model_card(self.draft.checkpoint, graph, self.precision)

    def _columns(self, vocabulary: DraftVocabulary) -> np.ndarray | slice:
        """Where the draft's tokens are in a row of q, but for what only a padded draft has."""
        if self.q_over is QOver.DRAFT:
            return slice(None)
        ids = vocabulary.target_ids()
        return ids[ids < vocabulary.target_size]

    def _parity(
        self,
        written: WrittenGraph,
        vocabulary: DraftVocabulary,
        path: Path,
        tokens: Sequence[int],
    ) -> Gate:
        tokens = tokens[: self.context]
        size, columns = vocabulary.q_size(self.q_over), self._columns(vocabulary)

        def run(graph: Path) -> Callable[[], np.ndarray]:
            return lambda: DraftGateGraph(graph, written.cache, size).probs(tokens)[:, columns]

        with gates.exact_arithmetic(path) as variant:
            return gates.parity(
                "draft parity",
                run(variant),
                run(path),
                self.draft.load_eager,
                tokens,
                self.precision,
                written.rounded,
                needs_bytes=self.draft.checkpoint.eager_bytes(),
            )
