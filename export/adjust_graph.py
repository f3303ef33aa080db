"""Penalties, logit bias and the mask of allowed tokens, in front of temperature.

    l ← l / r or l · r where seen (r: repetition penalty; Keskar et al. 2019)
    l ← l + bias − presence · [count > 0] − frequency · count
    l ← −∞ where not allowed

A row must see the history that plain decoding would have there: the committed tokens, which the
host counts, and the drafts of this round in front of it. Those are few, so the whole vocabulary is
adjusted by the committed counts once, and the drafted tokens' own logits are then put right row by
row. Invariant: a value written for a drafted token depends on its id and its row alone, so writing
it twice, for a token drafted twice, writes the same.

The arithmetic is Hugging Face's (repetition) and the OpenAI API's (presence, frequency, bias);
presence and frequency count generated tokens, repetition the prompt's too. The order differs from
that of Hugging Face's `generate` in one thing: it adds a sequence bias before it penalises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import onnx_ir as ir

from .control_flow import Op, f32, when
from .draft_vocabulary import DraftVocabulary
from .floor_search import any_of

FLOAT = ir.DataType.FLOAT
BANNED = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """The contract's inputs; ids of every table are those of the logits they adjust."""

    adjust: ir.Value  # [batch] bool
    repetition_penalty: ir.Value  # [batch] f32
    presence_penalty: ir.Value  # [batch] f32
    frequency_penalty: ir.Value  # [batch] f32
    logit_bias: ir.Value  # [batch, vocab] f32
    seen_tokens: ir.Value  # [batch, vocab] bool
    output_counts: ir.Value  # [batch, vocab] f32
    allowed_tokens: ir.Value  # [batch, rows, vocab] bool

    @classmethod
    def split(cls, inputs: dict[str, ir.Value]) -> tuple[Adjustments, dict[str, ir.Value]]:
        """A graph's inputs by name, told apart: these, and all others."""
        ours = {field.name for field in fields(cls)}
        others = {name: value for name, value in inputs.items() if name not in ours}
        return cls(**{name: inputs[name] for name in ours}), others

    def for_draft(self, op: Op, vocabulary: DraftVocabulary) -> Adjustments:
        """The same over the draft's ids; one that only a padded draft has takes the last token's.

        Its logit is −inf already.
        """
        ids = np.minimum(vocabulary.target_ids(), vocabulary.target_size - 1)
        if vocabulary.size == vocabulary.target_size and (ids == np.arange(len(ids))).all():
            return self
        index = op.initializer(ir.tensor(ids, name="adjusted_ids"))
        tables = ("logit_bias", "seen_tokens", "output_counts", "allowed_tokens")
        picked = {name: op.Gather(getattr(self, name), index, axis=-1) for name in tables}
        return Adjustments(**{**vars(self), **picked})


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """What adjusts some tokens: shapes broadcast to [batch, rows, tokens]."""

    seen: ir.Value  # bool
    counts: ir.Value  # f32
    bias: ir.Value  # f32
    allowed: ir.Value  # bool


def adjusted(
    op: Op,
    logits: ir.Value,  # [batch, rows, vocab] f32
    drafted: ir.Value,  # [batch, n] int64, ids of the logits
    behind: ir.Value,  # [batch or 1, rows, n] f32, 1 where the row comes after the draft
    adjustments: Callable[[Op], Adjustments],  # over the ids of the logits
    adjust: ir.Value,  # [batch] bool
    *,
    size: int,
) -> ir.Value:  # [batch, rows, vocab] f32
    """Adjusted logits; the logits themselves in a batch that adjusts none."""

    def compute(inner: Op) -> list[ir.Value]:
        given = adjustments(inner)
        whole = _penalised(inner, logits, _whole(inner, given), given)
        tokens = _per_row(inner, drafted, behind)
        raw = inner.GatherElements(logits, tokens, axis=2)
        corrected = _penalised(inner, raw, _at_drafts(inner, drafted, behind, given), given)
        return [inner.ScatterElements(whole, tokens, corrected, axis=2)]

    like = f32("batch", None, size)
    (result,) = when(op, any_of(op, adjust), [logits], compute, [like])
    return result


def _whole(op: Op, given: Adjustments) -> _Tables:
    """Every token, as the committed tokens leave it."""
    seen, counts, bias = (
        op.Unsqueeze(x, [1]) for x in (given.seen_tokens, given.output_counts, given.logit_bias)
    )
    return _Tables(seen=seen, counts=counts, bias=bias, allowed=given.allowed_tokens)


def _at_drafts(op: Op, drafted: ir.Value, behind: ir.Value, given: Adjustments) -> _Tables:
    """The drafted tokens alone, as each row finds them: [batch, rows, n] or broadcast to it."""
    same = op.Equal(op.Unsqueeze(drafted, [2]), op.Unsqueeze(drafted, [1]))  # [batch, n, n]
    fresh = op.MatMul(behind, op.Cast(same, to=FLOAT))  # times drafted in front of the row
    seen, counts, bias = (
        op.Unsqueeze(op.GatherElements(x, drafted, axis=1), [1])
        for x in (given.seen_tokens, given.output_counts, given.logit_bias)
    )
    return _Tables(
        seen=op.Or(seen, op.Greater(fresh, 0.0)),
        counts=op.Add(counts, fresh),
        bias=bias,
        allowed=op.GatherElements(given.allowed_tokens, _per_row(op, drafted, behind), axis=2),
    )


def _per_row(op: Op, drafted: ir.Value, behind: ir.Value) -> ir.Value:
    """[batch, n] → [batch, rows, n]."""
    rows = op.Shape(behind, start=1, end=2)
    n = op.Shape(drafted, start=1)
    batch = op.Shape(drafted, end=1)
    return op.Expand(op.Unsqueeze(drafted, [1]), op.Concat(batch, rows, n, axis=0))


def _penalised(op: Op, logits: ir.Value, tables: _Tables, given: Adjustments) -> ir.Value:
    """The formulas at the top of this file, without Where: on CPUs it costs ten other passes."""
    presence, frequency = (
        op.Unsqueeze(x, [1, 2]) for x in (given.presence_penalty, given.frequency_penalty)
    )
    present = op.Min(tables.counts, 1.0)
    penalty = op.Add(op.Mul(presence, present), op.Mul(frequency, tables.counts))
    scaled = _repeated(op, logits, tables.seen, op.Unsqueeze(given.repetition_penalty, [1, 2]))
    shifted = op.Add(scaled, op.Sub(tables.bias, penalty))
    # 1 − 1/1 is 0, 1 − 1/0 is −∞.
    mask = op.Sub(1.0, op.Reciprocal(op.Cast(tables.allowed, to=FLOAT)))
    return op.Add(shifted, mask)


def _repeated(op: Op, logits: ir.Value, seen: ir.Value, r: ir.Value) -> ir.Value:
    """l / r where l > 0, else l · r: the smaller of both for r ≥ 1, else the larger.

    The larger of two is less the smaller of their negatives, so r and the result change their sign.
    """
    sign = op.Where(op.Less(r, 1.0), -1.0, 1.0)
    factor = op.Where(seen, op.Mul(sign, r), sign)
    return op.Mul(op.Min(op.Div(logits, factor), op.Mul(logits, factor)), sign)


def rows_behind_drafts(op: Op, visible: ir.Value) -> ir.Value:
    """[batch, k + 1, k] f32 for accept: a row comes after the drafts that it sees, its own too."""
    return op.Cast(op.Slice(visible, [1], [2**31], [2]), to=FLOAT)


def all_drafts(op: Op, drafted: ir.Value) -> ir.Value:
    """[1, 1, n] f32 for a draft step: its row comes after all of them."""
    return op.Expand(1.0, op.Concat([1, 1], op.Shape(drafted, start=1), axis=0))
