"""What a build asks of a drafter, whatever its kind: open and check, write, put through gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engines.external_data import WeightStore
from runtime.manifest import DraftCard, Gate

# Tokens of a text → the target's hidden states at their rows, in f32: [n, feature_width].
States = Callable[[Sequence[int]], np.ndarray]


def no_states(_: Sequence[int]) -> np.ndarray:
    """Of a target whose states nobody reads."""
    return np.zeros((0, 0), np.float32)


@dataclass(frozen=True, kw_only=True)
class WrittenDraft:
    """What of a drafter is in the bundle now."""

    card: DraftCard
    vocab_size: int | None = None  # of q; None: the target's
    d2t: np.ndarray | None = None  # [vocab_size]: target id = i + d2t[i]; None: equal ids
    # Tokens of a text, and the target's states → checks of what was written.
    gates: Callable[[Sequence[int], States], list[Gate]]


class PlanDefaults:
    """What holds of most drafters."""

    @property
    def most_drafts(self) -> int | None:
        return None

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def makes_trees(self) -> bool:
        return False


class DraftPlan(Protocol):
    """A drafter that was checked against its target before anything slow is done."""

    @property
    def name(self) -> str:
        """As progress names it."""

    @property
    def context(self) -> int:
        """Tokens that it remembers, at most the target's; bounds how many it may draft."""

    @property
    def most_drafts(self) -> int | None:
        """Tokens that it can draft a round; None: no bound of its own."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads, as `export.taps` numbers them."""

    @property
    def makes_trees(self) -> bool:
        """Whether it can propose trees besides chains."""

    def write(
        self, onnx: Path, store: WeightStore, *, target_vocab: int, trees: bool
    ) -> WrittenDraft:
        """Write its graphs, if it has any, below `onnx`. Raises BuildError.

        trees: those that make trees, too; only where `makes_trees`.
        """
