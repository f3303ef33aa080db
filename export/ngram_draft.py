"""Lookup as a drafter: nothing to trace, nothing to write; the runtime holds it all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engines.external_data import WeightStore
from runtime.cards import MOST_NGRAM, NgramDraft
from runtime.errors import BuildError

from .draft_plan import PlanDefaults, WrittenDraft

MIN_NGRAM = 2  # what follows a single token, as it did before, follows one time in five
MAX_NGRAM = 4  # agreement beyond is counted, but finds no other places


@dataclass(frozen=True, kw_only=True)
class NgramDraftPlan(PlanDefaults):
    context: int
    card: NgramDraft

    @classmethod
    def of(cls, *, min_ngram: int | None, max_ngram: int | None, context: int) -> Self:
        """None takes the default, or the other bound where that excludes it. Raises BuildError."""
        shortest = min(MIN_NGRAM, max_ngram or MIN_NGRAM) if min_ngram is None else min_ngram
        longest = max(MAX_NGRAM, shortest) if max_ngram is None else max_ngram
        if not 1 <= shortest <= longest <= MOST_NGRAM:
            raise BuildError(
                f"--min-ngram {shortest} --max-ngram {longest}: received no range of lengths. "
                f"Expected 1 ≤ min ≤ max ≤ {MOST_NGRAM}."
            )
        return cls(context=context, card=NgramDraft(min_ngram=shortest, max_ngram=longest))

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def makes_trees(self) -> bool:
        return True

    def write(
        self, onnx: Path, store: WeightStore, *, target_vocab: int, trees: bool
    ) -> WrittenDraft:
        return WrittenDraft(card=self.card, gates=lambda *_: [])
