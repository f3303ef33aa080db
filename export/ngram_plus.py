"""Lookup before another drafter, on their way into a bundle: the other writes, the lookup doesn't.

q is over the target's vocabulary, whatever the other one drafts from: a looked-up token may be one
that it doesn't have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.external_data import WeightStore
from runtime.errors import BuildError
from runtime.manifest import (
    DraftCard,
    EagleDraft,
    MedusaDraft,
    ModelDraft,
    NgramPlusDraft,
    RetokenizedDraft,
)

from .draft_plan import DraftPlan, WrittenDraft
from .ngram_draft import NgramDraftPlan


@dataclass(frozen=True, kw_only=True)
class NgramPlusPlan:
    """`other` gives its q over the target's vocabulary."""

    lookup: NgramDraftPlan
    other: DraftPlan

    @property
    def name(self) -> str:
        return f"{self.lookup.name}, else {self.other.name}"

    @property
    def context(self) -> int:
        return self.other.context

    @property
    def most_drafts(self) -> int | None:
        return None  # a lookup has no bound, and the other one drafts as many as it can

    @property
    def taps(self) -> tuple[int, ...]:
        return self.other.taps

    @property
    def makes_trees(self) -> bool:
        return False

    def write(
        self, onnx: Path, store: WeightStore, *, target_vocab: int, trees: bool
    ) -> WrittenDraft:
        written = self.other.write(onnx, store, target_vocab=target_vocab, trees=False)
        card = NgramPlusDraft(ngram=self.lookup.card, other=_combinable(written.card))
        return WrittenDraft(card=card, gates=written.gates)


def _combinable(card: DraftCard) -> ModelDraft | EagleDraft | MedusaDraft | RetokenizedDraft:
    if isinstance(card, ModelDraft | EagleDraft | MedusaDraft | RetokenizedDraft):
        return card
    raise BuildError(
        f"--draft ngram+: received a drafter of the kind {card.kind}. Expected a draft model "
        "or heads behind the lookup; name their directory or hub id."
    )
