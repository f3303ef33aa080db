"""A draft model of another tokenizer on its way into a bundle: its graph in its own tokens.

The graph is the ordinary draft step over the draft's own vocabulary; nothing of it is mapped. What
it says is translated at run time, for which the bundle carries its tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engines.external_data import WeightStore
from runtime.manifest import DRAFT_TOKENIZER, Gate, ModelDraft, RetokenizedDraft

from .checkpoint import Checkpoint
from .draft import open_foreign
from .draft_plan import PlanDefaults, States, WrittenDraft
from .model_draft import ModelDraftPlan
from .precision import Precision


@dataclass(frozen=True, kw_only=True)
class RetokenizedDraftPlan(PlanDefaults):
    model: ModelDraftPlan

    @classmethod
    def open(
        cls, source: str, target: Checkpoint, *, target_context: int, precision: Precision
    ) -> Self:
        """Raises CheckpointError, and BuildError where nothing needs to be translated."""
        draft = open_foreign(source, target)
        model = ModelDraftPlan.of(draft, target_context=target_context, precision=precision)
        return cls(model=model)

    @property
    def name(self) -> str:
        return f"{self.model.name}, in its own tokens"

    @property
    def context(self) -> int:
        return self.model.context

    def write(
        self, onnx: Path, store: WeightStore, *, target_vocab: int, trees: bool
    ) -> WrittenDraft:
        draft = self.model.draft
        written = self.model.write(onnx, store, target_vocab=draft.vocab_size, trees=False)
        tokenizer = draft.checkpoint.text_files().tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.save(str(onnx.parent / DRAFT_TOKENIZER))

        def gates(tokens: Sequence[int], states: States) -> list[Gate]:
            """The target's tokens are no text to this model, but rows of it all the same."""
            return written.gates([token % draft.vocab_size for token in tokens], states)

        assert isinstance(written.card, ModelDraft)  # what a model's plan writes
        return WrittenDraft(card=RetokenizedDraft(card=written.card.card), gates=gates)
