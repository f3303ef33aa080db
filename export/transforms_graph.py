"""Temperature, top-k, top-p and min-p as one threshold per row, never a sort of the vocabulary.

Every transform keeps the tokens whose logit exceeds a *floor*, so a row's law needs only a few
numbers beside its logits:

    p(x) = [l(x) > floor] · exp((l(x) − peak) / T) / mass

The floor is read off a short TopK list; a row that the list does not cover is searched over the
whole vocabulary (`floor_search`), only then. The two are chosen per row, so what the neighbours
of a row ask for never changes its law.

What is kept follows Hugging Face's warpers, with one difference: tokens tied at the edge of top-p
are all kept (the warper keeps those that its sort happens to put last). Ties at the edge of top-k
are all kept in both. Further transforms (penalties, bias, masks) go in front: they change the
logits that `transformed` reads, where −inf is a token of mass 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .control_flow import Op, f32, when
from .floor_search import above, any_of, search
from .sampling_inputs import Sampling

LIST_TOKENS = 128  # TopK's cost grows with it; past 3,840 TensorRT builds no engine
TABLE_ROWS = 16
NOTHING, ALL = float("-inf"), float("inf")


@dataclass(frozen=True, kw_only=True)
class Law:
    """The transformed law of every row, as the numbers that define it: [batch, rows, 1] each."""

    sampling: Sampling
    peak: ir.Value  # f32: the largest logit
    floor: ir.Value  # f32: tokens above it are kept
    mass: ir.Value  # f32: sum of the kept weights

    def p(self, op: Op, logits: ir.Value) -> ir.Value:
        """Probability of tokens, given their logits [batch, rows, n]."""
        weights = self.sampling.weight(op, logits, self.peak)
        return op.Div(op.Mul(weights, above(op, logits, self.floor)), self.mass)

    def at_rows(self, op: Op, rows: ir.Value) -> Law:
        """The law of some rows of each sequence, rows [batch, n] int64."""
        peak, floor, mass = (pick_rows(op, x, rows) for x in (self.peak, self.floor, self.mass))
        return Law(sampling=self.sampling, peak=peak, floor=floor, mass=mass)


def pick_rows(op: Op, x: ir.Value, rows: ir.Value) -> ir.Value:
    """x [batch, rows, n] at rows [batch, m] → [batch, m, n]."""
    return op.GatherND(x, op.Unsqueeze(rows, [2]), batch_dims=1)


def transformed(
    op: Op,
    logits: ir.Value,  # [batch, rows, vocab] f32
    sampling: Sampling,
) -> Law:
    """Law of every row after temperature → top-k → top-p → min-p → normalise."""
    size = min(LIST_TOKENS, sampling.vocab)
    values = _largest(op, logits, size, sampling.vocab)
    peak = op.Slice(values, [0], [1], [2])
    law = _whole_list if size == sampling.vocab else _list_or_search
    floor, mass = law(op, logits, values, peak, sampling)
    return Law(sampling=sampling, peak=peak, floor=floor, mass=mass)


def _largest(op: Op, logits: ir.Value, size: int, vocab: int) -> ir.Value:
    """The largest logits of each row in falling order: [batch, rows, size].

    A large vocabulary is laid out as a table first: its `size` largest entries lie in the `size`
    columns whose maxima are largest, and finding maxima is much cheaper than TopK.
    """
    if vocab % TABLE_ROWS == 0 and vocab >= 8 * TABLE_ROWS * size:
        table = op.Reshape(logits, [0, 0, TABLE_ROWS, vocab // TABLE_ROWS])
        maxima = op.ReduceMax(table, [2], keepdims=0)
        _, columns = op.TopK(maxima, [size], axis=-1, largest=1, sorted=0, _outputs=2)
        columns = op.Expand(op.Unsqueeze(columns, [2]), [1, 1, TABLE_ROWS, 1])
        logits = op.Reshape(op.GatherElements(table, columns, axis=3), [0, 0, TABLE_ROWS * size])
    values, _ = op.TopK(logits, [size], axis=-1, largest=1, sorted=1, _outputs=2)
    return values


def _whole_list(
    op: Op, _: ir.Value, values: ir.Value, peak: ir.Value, sampling: Sampling
) -> tuple[ir.Value, ir.Value]:
    """The list is the whole vocabulary."""
    everything = op.ReduceSum(sampling.weight(op, values, peak), [2])
    floor, mass, _ = _from_list(op, values, peak, everything, sampling)
    return floor, mass


def _list_or_search(
    op: Op, logits: ir.Value, values: ir.Value, peak: ir.Value, sampling: Sampling
) -> tuple[ir.Value, ir.Value]:
    """Read the whole vocabulary only where some row needs it."""
    everything = _everything(op, logits, peak, sampling)
    floor, mass, covered = _from_list(op, values, peak, everything, sampling)
    missing = op.Not(op.Or(covered, sampling.greedy))

    def searched(inner: Op) -> list[ir.Value]:
        found = search(inner, logits, peak, missing, sampling)
        return [inner.Where(missing, f, x) for f, x in zip(found, (floor, mass), strict=True)]

    edge = f32("batch", None, 1)
    chosen = when(op, any_of(op, missing), [floor, mass], searched, [edge, edge])
    return chosen[0], chosen[1]


def _everything(op: Op, logits: ir.Value, peak: ir.Value, sampling: Sampling) -> ir.Value:
    """Weight of the whole vocabulary, where a row without top-k needs it: [batch, rows, 1]."""

    def total(inner: Op) -> list[ir.Value]:
        return [inner.ReduceSum(sampling.weight(inner, logits, peak), [2])]

    wanted = any_of(op, op.Not(op.Or(sampling.cut_by_top_k(op), sampling.greedy)))
    (mass,) = when(op, wanted, [peak], total, [f32("batch", None, 1)])
    return mass


def _from_list(
    op: Op,
    values: ir.Value,  # [batch, rows, n] f32, the largest logits in falling order
    peak: ir.Value,  # [batch, rows, 1] f32
    everything: ir.Value,  # [batch, rows, 1] f32, read in rows without top-k only
    sampling: Sampling,
) -> tuple[ir.Value, ir.Value, ir.Value]:  # [batch, rows, 1] f32, f32, bool
    """Floor and mass as the list shows them, and whether it shows enough to be right."""
    weights = sampling.weight(op, values, peak)
    in_top_k, top_k_ends = _kept_by_top_k(op, values, weights, sampling)
    top_k_mass = op.ReduceSum(op.Mul(weights, op.Cast(in_top_k, to=ir.DataType.FLOAT)), [2])
    top_k_mass = op.Where(sampling.cut_by_top_k(op), top_k_mass, everything)
    in_top_p = _kept_by_top_p(op, weights, top_k_mass, sampling)
    in_min_p = op.GreaterOrEqual(weights, sampling.min_p)
    chosen = op.And(in_top_k, op.And(in_top_p, in_min_p))
    kept = op.GreaterOrEqual(values, _lowest(op, values, chosen))  # ties with the last one too
    floor = op.ReduceMax(op.Where(kept, NOTHING, values), [2])
    mass = op.ReduceSum(op.Mul(weights, op.Cast(kept, to=ir.DataType.FLOAT)), [2])
    uncut = sampling.uncut(op)
    covered = op.Or(uncut, op.And(top_k_ends, _ends(op, kept, weights)))
    return op.Where(uncut, NOTHING, floor), op.Where(uncut, everything, mass), covered


def _kept_by_top_k(
    op: Op, values: ir.Value, weights: ir.Value, sampling: Sampling
) -> tuple[ir.Value, ir.Value]:
    """[batch, rows, n] kept, and [batch, rows, 1] whether tokens beyond the list are all cut."""
    size = min(LIST_TOKENS, sampling.vocab)
    ranks = op.initializer(ir.tensor(np.arange(size), name="ranks"))
    kept = op.GreaterOrEqual(values, _lowest(op, values, op.Less(ranks, sampling.top_k)))
    return kept, op.Or(op.Not(sampling.cut_by_top_k(op)), _ends(op, kept, weights))


def _kept_by_top_p(op: Op, weights: ir.Value, mass: ir.Value, sampling: Sampling) -> ir.Value:
    """Tokens with less than top_p of the mass in front of them."""
    ahead = op.CumSum(weights, 2, exclusive=1)
    within = op.Less(ahead, op.Mul(sampling.top_p, mass))
    return op.Or(within, op.Not(sampling.cut_by_top_p(op)))


def _lowest(op: Op, values: ir.Value, chosen: ir.Value) -> ir.Value:
    return op.ReduceMin(op.Where(chosen, values, ALL), [2])


def _ends(op: Op, kept: ir.Value, weights: ir.Value) -> ir.Value:
    """Whether nothing of weight can be kept beyond the list: its last token is cut or weighs 0."""
    last_kept, last_weight = (op.Slice(x, [-1], [2**31], [2]) for x in (kept, weights))
    return op.Or(op.Not(last_kept), op.LessOrEqual(last_weight, 0.0))
