"""Which drafted tokens stand, and the one token drawn after them: one pure graph.

Algorithm 1 of Leviathan et al. (2023), the same rule as Chen et al. (2023), over a tree. A row is a
token that may be committed, with the target's law p of what follows; several drafts may follow one
row. They are put to the test one after the other, each against what the rejected ones before it
left of p (SpecInfer, arXiv 2305.09781, algorithm 2; without replacement, since no two are alike):

    a certain draft x:  accept while u · (what is left of p's mass) < p(x); else p(x) ← 0
    the one drawn from q, behind them:  accept while u · q(x) · left < p(x);
                                        else p ← max(p − left · q, 0)
    where all drafts behind a row are rejected, or none is left, draw from p as it then is

A certain draft is one whose q is one-hot: its row is never asked for. One drawn from q behind
certain ones avoids them (Hu et al. 2025, arXiv 2502.18779, greedy multi-draft sampling). In a chain
each row has one draft, drawn from q, nothing was rejected before it, and this is algorithm 1
itself. So every token out is distributed as p, whatever the tree and q are, as long as neither
depends on the uniforms of the test. Where the rule leaves a choice:

- q(x) = 0 is a rejection: x cannot have been drawn from q.
- A row of q that is no distribution (sum off 1 by more than 1 %, NaN) is rejected and the draw is
  from p, so the law holds even for a broken draft; its acceptance of 0 shows in the statistics.
- A residual below 1e-6 is rounding; the draw is from p. Such a rejection is that improbable too.
- A greedy row accepts while x is the argmax; of q only q(x) > 0 is asked.

All k + 1 rows are needed to know where the round ends, but only at the drafted tokens, since what
certain drafts leave of p is a sum over siblings; the whole vocabulary is read in the one row where
the round ends. k = 0 is plain sampling. The greedy answer is
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
from .graph_signature import name_outputs, typed
from .sampling_inputs import Sampling, any_sampled
from .transforms_graph import Law, pick_rows, transformed

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
    draft_probs: ir.Value  # [batch, num_q_rows, draft_vocab] f32
    parents: ir.Value  # [batch, k] i64
    q_rows: ir.Value  # [batch, k] i64
    visible: ir.Value  # [batch, k + 1, k + 1] bool
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
        behind = rows_behind_drafts(op, self.visible)
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
    """num_accepted, next_token, last_row [batch] i64 each, new_lengths [batch] i32."""
    given = given.with_adjusted_logits(op)
    drafts = _Drafts.of(op, given)
    greedy = _greedy(op, given, drafts)

    def sampled(inner: Op) -> Values:
        is_greedy = inner.LessOrEqual(given.temperature, 0.0)
        pairs = zip(greedy, _sampled(inner, given, drafts), strict=True)
        return [inner.Where(is_greedy, one, other) for one, other in pairs]

    wanted = any_sampled(op, given.temperature)
    num_accepted, next_token, last_row = when(op, wanted, greedy, sampled, [i64("batch")] * 3)
    committed = op.Cast(op.Add(num_accepted, 1), to=ir.DataType.INT32)
    return [num_accepted, next_token, last_row, op.Add(given.past_lengths, committed)]


@dataclass(frozen=True, kw_only=True)
class _Drafts:
    """What is known of each draft before p is looked at: [batch, k] each."""

    drawn: ir.Value  # bool, from a row of q
    q: ir.Value  # f32: of the token, in the law that it was drawn from; 1 for a certain one
    drawable: ir.Value  # bool

    @classmethod
    def of(cls, op: Op, given: Round) -> _Drafts:
        drawn = op.GreaterOrEqual(given.q_rows, 0)
        rows = op.Max(given.q_rows, 0)
        q = given.vocabulary.q_at(op, given.draft_tokens, given.draft_probs, rows)
        q = op.Where(drawn, q, 1.0)
        return cls(drawn=drawn, q=q, drawable=op.Greater(q, 0.0))


def _greedy(op: Op, given: Round, drafts: _Drafts) -> Values:
    """Accept while the draft equals the argmax; ties go to the lowest id."""
    best = op.ArgMax(given.logits, axis=2, keepdims=0)  # [batch, k + 1]
    matches = op.Equal(given.draft_tokens, op.GatherElements(best, given.parents, axis=1))
    accepted, last = _path(op, given, op.And(matches, drafts.drawable))
    token = op.GatherElements(best, last, axis=1)
    return [op.Squeeze(x, [1]) for x in (accepted, token, last)]


def _path(op: Op, given: Round, taken: ir.Value) -> tuple[ir.Value, ir.Value]:
    """[batch, k] bool, at most one draft behind each row → how many are accepted and the row of the
    last, [batch, 1] int64 each: the deepest row that sees no draft but taken ones."""
    sees = op.Cast(given.visible, to=FLOAT)
    missed = op.Pad(op.Cast(op.Not(taken), to=FLOAT), [0, 1, 0, 0], 0.0)
    off = op.Squeeze(op.MatMul(sees, op.Unsqueeze(missed, [2])), [2])
    depth = op.ReduceSum(sees, [2], keepdims=0)  # the row itself counts
    last = op.ArgMax(op.Where(op.Greater(off, 0.0), 0.0, depth), axis=1)
    accepted = op.Sub(op.GatherElements(depth, last, axis=1), 1.0)
    return op.Cast(accepted, to=ir.DataType.INT64), last


def _sampled(op: Op, given: Round, drafts: _Drafts) -> Values:
    """Test the drafts behind each row in turn, then draw once."""
    law = transformed(op, given.logits, given.sampling(op))
    p = _p_at_drafts(op, given, law)
    before = _siblings_before(op, given)
    left = op.Relu(op.Sub(1.0, _sum(op, before, p)))
    accepts = op.Less(op.Mul(op.Mul(given.accept_uniforms, drafts.q), left), p)
    accepts = op.And(accepts, op.And(drafts.drawable, _sound_at(op, given, drafts)))
    first = op.LessOrEqual(_sum(op, before, op.Cast(accepts, to=FLOAT)), 0.0)
    accepted, last = _path(op, given, op.And(accepts, first))

    end = op.Squeeze(law.at_rows(op, last).p(op, pick_rows(op, given.logits, last)), [1])
    behind = op.Equal(given.parents, last)  # [batch, k]: the drafts that were all rejected
    weights = _without(op, given, end, op.And(behind, op.Not(drafts.drawn)))
    weights = _recovered(op, given, weights, op.And(behind, drafts.drawn), left)
    uniforms = op.GatherElements(given.draw_uniforms, last, axis=1)
    token = draw(op, weights, uniforms, size=given.vocabulary.target_size)
    return [op.Squeeze(x, [1]) for x in (accepted, token, last)]


def _p_at_drafts(op: Op, given: Round, law: Law) -> ir.Value:
    """p of each draft behind its parent, 0 for one that only a padded draft has: [batch, k]."""
    size = given.vocabulary.target_size
    tokens = op.Min(given.draft_tokens, size - 1)
    at = op.Concat(op.Unsqueeze(given.parents, [2]), op.Unsqueeze(tokens, [2]), axis=2)
    logits = op.Unsqueeze(op.GatherND(given.logits, at, batch_dims=1), [2])
    p = op.Squeeze(law.at_rows(op, given.parents).p(op, logits), [2])
    return op.Where(op.Less(given.draft_tokens, size), p, 0.0)


def _siblings_before(op: Op, given: Round) -> ir.Value:
    """[batch, k, k] f32: 1 where the column's draft comes before the row's, behind one parent."""
    same = op.Equal(op.Unsqueeze(given.parents, [2]), op.Unsqueeze(given.parents, [1]))
    return op.Trilu(op.Cast(same, to=FLOAT), -1, upper=0)


def _sum(op: Op, over: ir.Value, values: ir.Value) -> ir.Value:
    """[batch, k, k] · [batch, k] → [batch, k]."""
    return op.Squeeze(op.MatMul(over, op.Unsqueeze(values, [2])), [2])


def _without(op: Op, given: Round, p: ir.Value, rejected: ir.Value) -> ir.Value:
    """p [batch, vocab] without the mass of rejected [batch, k] certain drafts.

    What a token's place is set to depends on the token alone, so that one drafted elsewhere in the
    tree, too, is set to the same. Mass below LEAST_RESIDUAL is rounding: then it stays as it is.
    """
    size = given.vocabulary.target_size

    def compute(inner: Op) -> Values:
        tokens = inner.Min(given.draft_tokens, size - 1)
        same = inner.Equal(inner.Unsqueeze(tokens, [2]), inner.Unsqueeze(tokens, [1]))
        gone = _sum(inner, inner.Cast(same, to=FLOAT), inner.Cast(rejected, to=FLOAT))
        kept = inner.GatherElements(p, tokens, axis=1)
        kept = inner.Where(inner.Greater(gone, 0.0), 0.0, kept)
        result = inner.ScatterElements(p, tokens, kept, axis=1)
        left = inner.Greater(inner.ReduceSum(result, [1]), LEAST_RESIDUAL)
        return [inner.Where(left, result, p)]

    (result,) = when(op, _any(op, rejected), [p], compute, [f32("batch", size)])
    return result


def _recovered(
    op: Op,
    given: Round,
    p: ir.Value,  # [batch, vocab] f32, of the row where the round ends, without certain drafts
    rejected: ir.Value,  # [batch, k] bool: the one draft there that was drawn from q, if any was
    left: ir.Value,  # [batch, k] f32: of p's mass, when it was tested
) -> ir.Value:  # [batch, vocab] f32, unnormalised
    """Weights to draw from: max(p − left · q, 0) after a rejection, else p."""
    size = given.vocabulary.target_size

    def recovered(inner: Op) -> Values:
        row = inner.ReduceMax(inner.Where(rejected, given.q_rows, -1), [1])  # [batch, 1]
        mass = inner.ReduceMax(inner.Where(rejected, left, 0.0), [1])
        q = inner.GatherND(given.draft_probs, inner.Max(row, 0), batch_dims=1)
        spread = inner.Mul(mass, given.vocabulary.over_target(inner, q))
        residual = inner.Relu(inner.Sub(p, spread))
        some = inner.Greater(inner.ReduceSum(residual, [1]), inner.Mul(mass, LEAST_RESIDUAL))
        some = inner.And(inner.GreaterOrEqual(row, 0), some)
        use = inner.And(some, inner.Unsqueeze(_sound(inner, q), [1]))
        return [inner.Where(use, residual, p)]

    (weights,) = when(op, _any(op, rejected), [p], recovered, [f32("batch", size)])
    return weights


def _any(op: Op, flags: ir.Value) -> ir.Value:
    """[] bool; false where there are none."""
    count = op.ReduceSum(op.Cast(flags, to=FLOAT), keepdims=0)
    return op.Greater(count, 0.0)


def _sound_at(op: Op, given: Round, drafts: _Drafts) -> ir.Value:
    """[batch, k] bool: whether what a draft was drawn from is a distribution."""
    sound = op.GatherElements(
        op.Cast(_sound(op, given.draft_probs), to=FLOAT), op.Max(given.q_rows, 0), axis=1
    )
    return op.Or(op.Not(drafts.drawn), op.Greater(sound, 0.0))


def _sound(op: Op, q: ir.Value) -> ir.Value:
    """Whether rows of q [..., draft_vocab] are distributions; false for NaN."""
    return op.Less(op.Abs(op.Sub(op.ReduceSum(q, [-1], keepdims=0), 1.0)), Q_SUM_SLACK)
