"""The sampling parameters of a batch, shaped to broadcast over [batch, rows, vocab].

Rows of a batch may ask for different things, so whether a transform cuts anything is itself a
tensor. Invariant: what one row asks for never changes the arithmetic of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .control_flow import Op


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters, [batch, 1, 1] each."""

    greedy: ir.Value  # bool
    temperature: ir.Value  # f32; 1 in a greedy row, whose sampled result is not read
    top_k: ir.Value  # int64 in 1 to vocab
    top_p: ir.Value  # f32
    min_p: ir.Value  # f32
    vocab: int

    @classmethod
    def of(
        cls,
        op: Op,
        temperature: ir.Value,  # [batch] f32, 0 is greedy
        top_k: ir.Value,  # [batch] int64, 0 keeps all
        top_p: ir.Value,  # [batch] f32, 1 keeps all
        min_p: ir.Value,  # [batch] f32, 0 keeps all
        *,
        vocab: int,
    ) -> Sampling:
        """From the contract's inputs."""
        t, k, p, m = (op.Unsqueeze(x, [1, 2]) for x in (temperature, top_k, top_p, min_p))
        greedy = op.LessOrEqual(t, 0.0)
        return cls(
            greedy=greedy,
            temperature=op.Where(greedy, 1.0, t),
            top_k=op.Where(op.Less(k, 1), vocab, op.Min(k, vocab)),
            top_p=p,
            min_p=m,
            vocab=vocab,
        )

    def cut_by_top_k(self, op: Op) -> ir.Value:
        return op.Less(self.top_k, self.vocab)

    def cut_by_top_p(self, op: Op) -> ir.Value:
        return op.Less(self.top_p, 1.0)

    def uncut(self, op: Op) -> ir.Value:
        """Rows that temperature alone transforms."""
        cut = op.Or(self.cut_by_top_k(op), self.cut_by_top_p(op))
        return op.Not(op.Or(cut, op.Greater(self.min_p, 0.0)))

    def weight(self, op: Op, logits: ir.Value, peak: ir.Value) -> ir.Value:
        """exp((l − peak) / T). Subtracting before dividing keeps huge logits finite."""
        return op.Exp(op.Div(op.Sub(logits, peak), self.temperature))


def any_sampled(op: Op, temperature: ir.Value) -> ir.Value:
    """Whether some row of the batch is not greedy: [] bool."""
    return op.Greater(op.ReduceMax(temperature, keepdims=0), 0.0)
