"""The floor of a row found by bisection over the whole vocabulary: the exact, rare path.

Top-k and top-p are one question: the smallest logit t such that the tokens above t, counted or
weighed, stay below a target. Bisection on t needs only compares and sums, which every backend has
in any vocabulary size. Invariant: tokens above `high` stay below the target, tokens above `low` do
not; once a single token lies between them, or no f32 does, what lies above `low` is kept exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .control_flow import Op, Values, f32, repeat
from .sampling_inputs import Sampling

NO_WEIGHT = 110.0  # exp(−110) is 0 in f32
LOWEST = -3.0e38
MOST_STEPS = 400  # more than f32 has halvings between its extremes; about 15 are usual


def above(op: Op, logits: ir.Value, floor: ir.Value) -> ir.Value:
    """1 where the logit exceeds the floor, else 0, as f32: cheaper to multiply than a Where."""
    return op.Cast(op.Greater(logits, floor), to=ir.DataType.FLOAT)


def any_of(op: Op, flags: ir.Value) -> ir.Value:
    """[] bool."""
    return op.Greater(op.ReduceMax(op.Cast(flags, to=ir.DataType.FLOAT), keepdims=0), 0.0)


def search(
    op: Op,
    logits: ir.Value,  # [batch, rows, vocab] f32
    peak: ir.Value,  # [batch, rows, 1] f32
    missing: ir.Value,  # [batch, rows, 1] bool, rows whose result is read
    sampling: Sampling,
) -> tuple[ir.Value, ir.Value]:  # floor, mass: [batch, rows, 1] f32
    """Floor and mass of the missing rows; of other rows some value."""
    weights = sampling.weight(op, logits, peak)
    find = _Bisection(logits=logits, weights=weights, peak=peak, sampling=sampling)
    by_k = op.And(missing, sampling.cut_by_top_k(op))
    by_p = op.And(missing, sampling.cut_by_top_p(op))
    floor = find.floor(op, op.Cast(sampling.top_k, to=ir.DataType.FLOAT), by_k, weighed=False)
    top_p_mass = op.Mul(sampling.top_p, find.mass_above(op, floor))
    floor = op.Max(floor, find.floor(op, top_p_mass, by_p, weighed=True))
    too_light = op.Less(weights, sampling.min_p)
    floor = op.Max(floor, op.ReduceMax(op.Where(too_light, logits, float("-inf")), [2]))
    return floor, find.mass_above(op, floor)


@dataclass(frozen=True, kw_only=True)
class _Bisection:
    logits: ir.Value  # [batch, rows, vocab]
    weights: ir.Value  # [batch, rows, vocab]
    peak: ir.Value  # [batch, rows, 1]
    sampling: Sampling

    def mass_above(self, op: Op, floor: ir.Value) -> ir.Value:
        return op.ReduceSum(op.Mul(self.weights, above(op, self.logits, floor)), [2])

    def floor(self, op: Op, target: ir.Value, wanted: ir.Value, *, weighed: bool) -> ir.Value:
        """Largest floor above which the target is reached; −inf in rows that are not wanted."""
        low = op.Max(op.Sub(self.peak, op.Mul(self.sampling.temperature, NO_WEIGHT)), LOWEST)
        none = op.Mul(op.Cast(wanted, to=ir.DataType.FLOAT), 0.0)  # tokens above the peak
        everyone = op.Add(none, float(self.sampling.vocab))

        def step(inner: Op, *state: ir.Value) -> tuple[ir.Value, Values]:
            return self._halve(inner, target, wanted, *state, weighed=weighed)

        edge = f32("batch", None, 1)
        state = [low, self.peak, everyone, none]
        low, *_ = repeat(op, any_of(op, wanted), state, step, [edge] * 4, at_most=MOST_STEPS)
        return op.Where(wanted, low, float("-inf"))

    def _halve(
        self,
        op: Op,
        target: ir.Value,
        wanted: ir.Value,
        low: ir.Value,
        high: ir.Value,
        above_low: ir.Value,
        above_high: ir.Value,
        *,
        weighed: bool,
    ) -> tuple[ir.Value, Values]:
        """One step; goes on while some wanted row has two tokens or more in its bracket."""
        middle = op.Add(op.Mul(low, 0.5), op.Mul(high, 0.5))
        flags = above(op, self.logits, middle)
        count = op.ReduceSum(flags, [2])
        reached = op.ReduceSum(op.Mul(flags, self.weights), [2]) if weighed else count
        below = op.Less(reached, target)
        inside = op.And(op.Greater(middle, low), op.Less(middle, high))
        state = [
            op.Where(below, low, middle),
            op.Where(below, middle, high),
            op.Where(below, above_low, count),
            op.Where(below, count, above_high),
        ]
        several = op.Greater(op.Sub(state[2], state[3]), 1.0)
        return any_of(op, op.And(wanted, op.And(several, inside))), state
