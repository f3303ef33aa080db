"""Which drafted tokens stand, and the one token drawn after them: one pure graph.

Algorithm 1 of Leviathan et al. (2023), the same rule as Chen et al. (2023). With p the target's law
of a row and q the law that the draft token x was really drawn from:

    accept x while u · q(x) < p(x)
    at the first rejection draw from norm(max(p − q, 0)), after k accepts from row k's p

so that every token out is distributed as p, whatever q is. Where the rule leaves a choice:

- q(x) = 0 is a rejection: x cannot have been drawn from q.
- A row of q that is no distribution (sum off 1 by more than 1 %, NaN) is rejected and the draw is
  from p, so the law holds even for a broken draft; its acceptance of 0 shows in the statistics.
- A residual below 1e-6 is rounding; the draw is from p. Such a rejection is that improbable too.
- A greedy row accepts while x is the argmax; of q only q(x) > 0 is asked.

All k + 1 rows are needed to know where the round ends, but only at the drafted tokens; the whole
vocabulary is read in the one row where it ends. k = 0 is plain sampling. The greedy answer is
computed first, and is all there is to compute in a batch of greedy rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, NameFixPass
from onnxscript import GraphBuilder

from runtime.contract import accept_graph

from .adjust_graph import Adjustments, adjusted, rows_behind_drafts
from .control_flow import Op, Values, f32, i64, when
from .draft_vocabulary import DraftVocabulary
from .draw_graph import draw
from .floor_search import any_of
from .graph_signature import name_outputs, typed
from .sampling_inputs import Sampling, any_sampled
from .transforms_graph import Law, pick_row, transformed

OPSET = 24
IR_VERSION = 10
LEAST_RESIDUAL = 1e-6
Q_SUM_SLACK = 0.01
FLOAT = ir.DataType.FLOAT


def accept_model(
    vocab_size: int,
    d2t: np.ndarray | None = None,  # [draft_vocab] int64, target id = i + d2t[i]
    *,
    draft_vocab_size: int | None = None,
) -> ir.Model:
    """The graph of `runtime.contract.accept_graph` for one pair of vocabularies.

    Without d2t the draft's ids are the target's; either vocabulary may be padded beyond the other.
    Raises VocabularyMismatch for a map that fits neither.
    """
    size = draft_vocab_size or (vocab_size if d2t is None else len(d2t))
    vocabulary = DraftVocabulary(target_size=vocab_size, size=size, d2t=d2t)
    builder = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="accept"))
    sizes = {"vocab": vocab_size, "draft_vocab": size}
    inputs = {s.name: builder.input(s.name, *typed(s, sizes)) for s in accept_graph().inputs}
    outputs = accept(builder.op, Round.of(inputs, vocabulary))
    name_outputs(outputs, accept_graph().outputs, sizes)
    builder.graph.outputs.extend(outputs)
    model = ir.Model(builder.graph, ir_version=IR_VERSION)
    NameFixPass()(model)
    ClearMetadataAndDocStringPass()(model)
    return model


@dataclass(frozen=True, kw_only=True)
class Round:
    """The contract's inputs; a name that the contract lacks fails here."""

    vocabulary: DraftVocabulary
    logits: ir.Value  # [batch, k + 1, vocab] f32
    draft_tokens: ir.Value  # [batch, k] i64
    draft_probs: ir.Value  # [batch, k, draft_vocab] f32
    accept_uniforms: ir.Value  # [batch, k] f32
    draw_uniforms: ir.Value  # [batch, k + 1] f32
    past_lengths: ir.Value  # [batch] i32
    temperature: ir.Value  # [batch] f32
    top_k: ir.Value  # [batch] i64
    top_p: ir.Value  # [batch] f32
    min_p: ir.Value  # [batch] f32
    adjustments: Adjustments

    @classmethod
    def of(cls, inputs: dict[str, ir.Value], vocabulary: DraftVocabulary) -> Round:
        adjustments, others = Adjustments.split(inputs)
        return cls(vocabulary=vocabulary, adjustments=adjustments, **others)

    def with_adjusted_logits(self, op: Op) -> Round:
        """Every row's logits as plain decoding would find them behind the drafts before it."""
        size = self.vocabulary.target_size
        # A draft that the target lacks is rejected, so no row behind it is read.
        drafted = op.Min(self.draft_tokens, size - 1)
        behind = rows_behind_drafts(op, drafted)
        given = self.adjustments
        logits = adjusted(
            op, self.logits, drafted, behind, lambda _: given, given.adjust, size=size
        )
        return replace(self, logits=logits)

    def sampling(self, op: Op) -> Sampling:
        return Sampling.of(
            op, self.temperature, self.top_k, self.top_p, self.min_p,
            vocab=self.vocabulary.target_size,
        )  # fmt: skip


def accept(op: Op, given: Round) -> Values:
    """num_accepted [batch] i64, next_token [batch] i64, new_lengths [batch] i32."""
    given = given.with_adjusted_logits(op)
    q = given.vocabulary.q_at(op, given.draft_tokens, given.draft_probs)
    drawable = op.Greater(q, 0.0)
    greedy = _greedy(op, given, drawable)

    def sampled(inner: Op) -> Values:
        is_greedy = inner.LessOrEqual(given.temperature, 0.0)
        pairs = zip(greedy, _sampled(inner, given, q, drawable), strict=True)
        return [inner.Where(is_greedy, one, other) for one, other in pairs]

    wanted = any_sampled(op, given.temperature)
    num_accepted, next_token = when(op, wanted, greedy, sampled, [i64("batch"), i64("batch")])
    committed = op.Cast(op.Add(num_accepted, 1), to=ir.DataType.INT32)
    return [num_accepted, next_token, op.Add(given.past_lengths, committed)]


def _greedy(op: Op, given: Round, drawable: ir.Value) -> Values:
    """Accept while the draft equals the argmax; ties go to the lowest id."""
    best = op.ArgMax(given.logits, axis=2, keepdims=0)  # [batch, k + 1]
    matches = op.Equal(given.draft_tokens, op.Slice(best, [0], [-1], [1]))
    accepted = _leading(op, op.And(matches, drawable))
    return [op.Squeeze(accepted, [1]), op.GatherND(best, accepted, batch_dims=1)]


def _sampled(op: Op, given: Round, q: ir.Value, drawable: ir.Value) -> Values:
    """Algorithm 1: accept while u · q(x) < p(x), then draw once."""
    law = transformed(op, given.logits, given.sampling(op))
    accepts = op.Less(op.Mul(given.accept_uniforms, q), _p_at_drafts(op, given, law))
    accepts = op.And(accepts, op.And(drawable, _sound(op, given.draft_probs)))
    accepted = _leading(op, accepts)  # [batch, 1]

    end = pick_row(op, given.logits, accepted)
    p = op.Squeeze(law.at_row(op, accepted).p(op, end), [1])
    weights = _recovered_or_bonus(op, given, p, accepted)
    uniforms = op.GatherElements(given.draw_uniforms, accepted, axis=1)
    token = draw(op, weights, uniforms, size=given.vocabulary.target_size)
    return [op.Squeeze(accepted, [1]), op.Squeeze(token, [1])]


def _p_at_drafts(op: Op, given: Round, law: Law) -> ir.Value:
    """p of each drafted token, 0 for one that only a padded draft vocabulary has: [batch, k]."""
    size = given.vocabulary.target_size
    # One token for each of the k + 1 rows; the last row's is a filler.
    tokens = op.Pad(op.Min(given.draft_tokens, size - 1), [0, 0, 0, 1], 0)
    logits = op.GatherElements(given.logits, op.Unsqueeze(tokens, [2]), axis=2)
    p = op.Slice(op.Squeeze(law.p(op, logits), [2]), [0], [-1], [1])
    return op.Where(op.Less(given.draft_tokens, size), p, 0.0)


def _recovered_or_bonus(
    op: Op,
    given: Round,
    p: ir.Value,  # [batch, vocab] f32, of the row where the round ends
    row: ir.Value,  # [batch, 1] int64
) -> ir.Value:  # [batch, vocab] f32, unnormalised
    """Weights to draw from: max(p − q, 0) after a rejection, p after k accepts."""
    k = op.Shape(given.draft_tokens, start=1)
    rejected = op.Less(row, k)

    def recovered(inner: Op) -> Values:
        at = inner.Min(row, inner.Sub(k, 1))
        q_row = inner.GatherND(given.draft_probs, at, batch_dims=1)
        residual = inner.Relu(inner.Sub(p, given.vocabulary.over_target(inner, q_row)))
        left = inner.Greater(inner.ReduceSum(residual, [1]), LEAST_RESIDUAL)
        use = inner.And(rejected, inner.And(left, inner.Unsqueeze(_sound(inner, q_row), [1])))
        return [inner.Where(use, residual, p)]

    size = given.vocabulary.target_size
    (weights,) = when(op, any_of(op, rejected), [p], recovered, [f32("batch", size)])
    return weights


def _sound(op: Op, q: ir.Value) -> ir.Value:
    """Whether rows of q [..., draft_vocab] are distributions; false for NaN."""
    return op.Less(op.Abs(op.Sub(op.ReduceSum(q, [-1], keepdims=0), 1.0)), Q_SUM_SLACK)


def _leading(op: Op, accept: ir.Value) -> ir.Value:
    """[batch, k] bool → [batch, 1] int64: how many stand before the first that does not."""
    stop = op.Cast(op.Not(accept), to=FLOAT)
    return op.ArgMax(op.Pad(stop, [0, 0, 0, 1], 1.0), axis=1)
