"""How far two computations of the same thing may differ, by precision, with the reason.

`relative` is |a - b| / |b - mean(b)| in the 2-norm over all logits. Token ids and index arithmetic
compare exactly and have no tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    eager: float  # the graph against the eager model with the same (rounded) weights
    rows: float  # k + 1 rows at once against row by row
    reason: str


TOLERANCES = {
    "fp32": Tolerance(
        eager=1e-3,
        rows=1e-4,
        reason="f32 sums in another order; errors grow with depth, not with a wrong operator",
    ),
    "int8": Tolerance(
        eager=0.10,
        rows=0.05,
        reason="the engine rounds each activation block to int8 before it multiplies",
    ),
    "int4": Tolerance(
        eager=0.10,
        rows=0.05,
        reason="the engine rounds each activation block to int8 before it multiplies",
    ),
}
