"""How far a bundle may be from its reference: each cell beyond a limit is named.

All prompts of a temperature are judged by their estimate. A category has few of them, so its
acceptance must have fallen by more than chance, too: its interval lies below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cells import ALL, Cell
from .resamples import Interval


@dataclass(frozen=True, kw_only=True)
class Limits:
    """None judges nothing. A drop is of mean Σ min(p, q), the whole bundle against the whole
    reference; KL is the target's, in nats a token."""

    max_acceptance_drop: float | None = None
    max_kl: float | None = None

    def failures(self, cells: Sequence[Cell]) -> list[str]:
        """A sentence for each cell beyond a limit."""
        return [text for cell in cells for text in (self._drop(cell), self._kl(cell)) if text]

    def _drop(self, cell: Cell) -> str | None:
        change = cell.differences["both"]
        limit = self.max_acceptance_drop
        if limit is None or change is None or -change.value <= limit:
            return None
        if cell.category != ALL and change.is_chance:
            return None
        return (
            f"acceptance at {where(cell)} changed by {change.value:+.4f}{_span(change)}. Expected "
            f"a drop of at most {limit:g}."
        )

    def _kl(self, cell: Cell) -> str | None:
        found, limit = cell.drift.kl, self.max_kl
        if limit is None or found is None or found.value <= limit:
            return None
        return (
            f"KL at {where(cell)} is {found.value:.4f}{_span(found)}. Expected at most {limit:g}."
        )


def _span(found: Interval) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 %: {found.low:.4f} to {found.high:.4f})"


def where(cell: Cell) -> str:
    return f"temperature {cell.temperature}, category {cell.category}"
