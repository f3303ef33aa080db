"""Which target token each draft token is.

Three cases: one vocabulary, one padded beyond the other (bugs 16), or a trimmed draft vocabulary
with an EAGLE-3 map, target id = i + d2t[i]. Invariant: no two draft tokens are one target token,
so spreading q over the target's vocabulary loses no mass that a target token could claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import onnx_ir as ir

from runtime.errors import VocabularyMismatch

from .control_flow import Op


class QOver(Enum):
    """Whose tokens a row of q counts: the draft's alone, or all of the target's."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """Sizes V (target) and D (draft), and the map between their ids; None means equal ids."""

    target_size: int
    size: int
    d2t: np.ndarray | None = None  # [D] int64

    def __post_init__(self) -> None:
        if self.d2t is not None:
            check_length(self.d2t, self.size)
            _check_targets(self.target_ids(), self.target_size)

    def target_ids(self) -> np.ndarray:  # [D] int64
        """Target id of every draft token."""
        ids = np.arange(self.size, dtype=np.int64)
        return ids if self.d2t is None else ids + np.asarray(self.d2t, dtype=np.int64)

    def q_size(self, q_over: QOver) -> int:
        """Entries of a row of q."""
        return self.size if q_over is QOver.DRAFT else self.target_size

    def q_at(
        self,
        op: Op,
        tokens: ir.Value,  # [batch, k] int64, target ids
        probs: ir.Value,  # [batch, n, draft_vocab] f32
        rows: ir.Value,  # [batch, k] int64, the row of probs for each token
    ) -> ir.Value:  # [batch, k] f32
        """q of the given target tokens: 0 for a token that the draft does not have."""
        columns = op.Min(self.draft_ids(op, tokens), self.size)
        inside = op.Less(columns, self.size)
        column = op.Min(columns, self.size - 1)
        at = op.Concat(op.Unsqueeze(rows, [2]), op.Unsqueeze(column, [2]), axis=2)
        return op.Where(inside, op.GatherND(probs, at, batch_dims=1), 0.0)

    def over_target(
        self,
        op: Op,
        row: ir.Value,  # [batch, draft_vocab] f32
    ) -> ir.Value:  # [batch, vocab] f32
        """One row of q spread over the target's vocabulary."""
        if self.d2t is None and self.size == self.target_size:
            return row
        if self.d2t is None:
            # A negative pad trims the ids that only the draft has.
            return op.Pad(row, [0, 0, 0, self.target_size - self.size], 0.0)
        ids = op.initializer(ir.tensor(self.target_ids()[None], name="target_ids"))
        zeros = op.Expand(0.0, op.Concat(op.Shape(row, end=1), [self.target_size], axis=0))
        return op.ScatterElements(zeros, op.Expand(ids, op.Shape(row)), row, axis=1)

    def draft_ids(self, op: Op, tokens: ir.Value) -> ir.Value:
        """The draft's ids of target tokens, `size` or beyond for those that it lacks."""
        if self.d2t is None:
            return tokens
        t2d = np.full(self.target_size, self.size, dtype=np.int64)
        t2d[self.target_ids()] = np.arange(self.size)
        return op.Gather(op.initializer(ir.tensor(t2d, name="draft_ids")), tokens, axis=0)


def check_length(d2t: np.ndarray, size: int) -> None:
    """Raise VocabularyMismatch unless d2t has one entry a draft token."""
    if np.shape(d2t) != (size,):
        raise VocabularyMismatch(
            f"d2t: received shape {list(np.shape(d2t))}. Expected [{size}], one entry a draft "
            "token; the map belongs to another draft."
        )


def _check_targets(ids: np.ndarray, target_size: int) -> None:
    outside = np.flatnonzero((ids < 0) | (ids >= target_size))
    if outside.size:
        i = int(outside[0])
        raise VocabularyMismatch(
            f"d2t: draft token {i} maps to target token {ids[i]}. Expected one in 0 to "
            f"{target_size - 1}; the map belongs to another target."
        )
    known, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise VocabularyMismatch(
            f"d2t: {int(counts.max())} draft tokens map to target token "
            f"{known[counts.argmax()]}. Expected a map that is one to one; the file is damaged."
        )
