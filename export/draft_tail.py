"""The sampling tail of a draft step: from the draft's logits to one token and q.

q is returned as it was sampled from, after every transform: q taken earlier inflates acceptance and
bends the output's law (bugs 1). Invariant: `draft_token` is drawn from `draft_step_probs` and from
nothing else; a greedy row's q is one-hot. Ids that only a padded draft has are never drawn: the
target can't read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass
from onnxscript import GraphBuilder

from runtime.contract import DRAFT_SAMPLING, DRAFT_STEP_PROBS, DRAFT_TOKEN, LOGITS
from runtime.errors import BuildError

from .adjust_graph import BANNED, Adjustments, adjusted, all_drafts
from .control_flow import Op, Values, f32, i64, when
from .draft_vocabulary import DraftVocabulary, QOver, check_length
from .draw_graph import draw
from .graph_signature import name_outputs, typed
from .sampling_inputs import Sampling, any_sampled
from .transforms_graph import transformed


def append_draft_sampling(
    model: ir.Model,
    d2t: np.ndarray | None = None,  # [draft_vocab] int64, target id = i + d2t[i]
    *,
    vocab_size: int | None = None,  # the target's; None: the draft's own
    q_over: QOver = QOver.DRAFT,
) -> None:
    """Replace the output `logits` [batch, 1, draft_vocab] f32 by the sampled token and q.

    Raises BuildError where there is no such output, VocabularyMismatch for another draft's map.
    """
    position, logits = _logits(model)
    size = _draft_vocab(logits, d2t)
    vocabulary = DraftVocabulary(target_size=vocab_size or size, size=size, d2t=d2t)
    builder = GraphBuilder(model.graph)
    builder.push_module("draft_sampling")
    sizes = {"vocab": vocabulary.target_size, "draft_vocab": size}
    inputs = {s.name: builder.input(s.name, *typed(s, sizes)) for s in DRAFT_SAMPLING}
    step = _Step.of(inputs, vocabulary)
    known = _known(builder.op, logits, vocabulary)
    token, probs = _sample(builder.op, step.adjusted(builder.op, known), step)
    outputs = [_target_ids(builder.op, token, d2t), _q(builder.op, probs, vocabulary, q_over)]
    name_outputs(
        outputs,
        (DRAFT_TOKEN, DRAFT_STEP_PROBS),
        sizes | {"draft_vocab": vocabulary.q_size(q_over)},
    )
    model.graph.outputs[position : position + 1] = outputs
    NameFixPass()(model)


def tail_model(
    size: int,
    d2t: np.ndarray | None = None,
    *,
    vocab_size: int | None = None,
    q_over: QOver = QOver.DRAFT,
) -> ir.Model:
    """The tail alone, behind logits [batch, 1, size] f32 that another graph made.

    d2t, vocab_size, q_over: as in `append_draft_sampling`.
    """
    logits = ir.val(LOGITS.name, dtype=ir.DataType.FLOAT, shape=["batch", 1, size])
    graph = ir.Graph([logits], [logits], nodes=[], opset_imports={"": 24}, name="tail")
    model = ir.Model(graph, ir_version=10)
    append_draft_sampling(model, d2t, vocab_size=vocab_size, q_over=q_over)
    return model


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The contract's inputs; a name that the contract lacks fails here."""

    vocabulary: DraftVocabulary
    draft_uniforms: ir.Value  # [batch] f32
    temperature: ir.Value  # [batch] f32
    top_k: ir.Value  # [batch] i64
    top_p: ir.Value  # [batch] f32
    min_p: ir.Value  # [batch] f32
    drafted_tokens: ir.Value  # [batch, drafted] i64, target ids
    adjustments: Adjustments

    @classmethod
    def of(cls, inputs: dict[str, ir.Value], vocabulary: DraftVocabulary) -> _Step:
        adjustments, others = Adjustments.split(inputs)
        return cls(vocabulary=vocabulary, adjustments=adjustments, **others)

    def adjusted(self, op: Op, logits: ir.Value) -> ir.Value:
        """The logits as the committed tokens and this round's drafts leave them."""
        drafted = self.vocabulary.draft_ids(op, self.drafted_tokens)
        drafted = op.Min(drafted, self.vocabulary.size - 1)
        return adjusted(
            op, logits, drafted, all_drafts(op, drafted),
            lambda inner: self.adjustments.for_draft(inner, self.vocabulary),
            self.adjustments.adjust, size=self.vocabulary.size,
        )  # fmt: skip

    def sampling(self, op: Op) -> Sampling:
        return Sampling.of(
            op, self.temperature, self.top_k, self.top_p, self.min_p, vocab=self.vocabulary.size
        )


def _known(op: Op, logits: ir.Value, vocabulary: DraftVocabulary) -> ir.Value:
    """The logits with −inf at ids that only a padded draft has."""
    padding = vocabulary.size - vocabulary.target_size
    if padding <= 0:
        return logits
    known = op.Slice(logits, [0], [vocabulary.target_size], [2])
    return op.Pad(known, [0, 0, 0, 0, 0, padding], BANNED)


def _sample(
    op: Op,
    logits: ir.Value,  # [batch, 1, draft_vocab] f32
    step: _Step,
) -> Values:
    """Token of the draft vocabulary [batch, 1] int64, and q [batch, 1, draft_vocab] f32."""
    size = step.vocabulary.size
    best = op.ArgMax(logits, axis=2, keepdims=0)
    greedy = [best, op.OneHot(best, size, [0.0, 1.0], axis=-1)]

    def sampled(inner: Op) -> Values:
        law = transformed(inner, logits, step.sampling(inner))
        is_greedy, q = law.sampling.greedy, law.p(inner, logits)
        u = inner.Unsqueeze(step.draft_uniforms, [1])
        token = draw(inner, inner.Squeeze(q, [1]), u, size=size)
        token = inner.Where(inner.Squeeze(is_greedy, [2]), best, token)
        return [token, inner.Where(is_greedy, greedy[1], q)]

    wanted = any_sampled(op, step.temperature)
    return when(op, wanted, greedy, sampled, [i64("batch", 1), f32("batch", 1, size)])


def _q(op: Op, probs: ir.Value, vocabulary: DraftVocabulary, q_over: QOver) -> ir.Value:
    """q [batch, 1, draft_vocab or vocab] f32."""
    if q_over is QOver.DRAFT:
        return op.Identity(probs)
    spread = vocabulary.over_target(op, op.Squeeze(probs, [1]))
    return op.Unsqueeze(spread, [1])


def _target_ids(op: Op, token: ir.Value, d2t: np.ndarray | None) -> ir.Value:
    if d2t is None:
        return op.Identity(token)
    shift = op.initializer(ir.tensor(np.asarray(d2t, dtype=np.int64), name="d2t"))
    return op.Add(token, op.Gather(shift, token))


def _logits(model: ir.Model) -> tuple[int, ir.Value]:
    for position, value in enumerate(model.graph.outputs):
        if value.name == LOGITS.name:
            return position, value
    raise BuildError(
        f"draft: received outputs {[v.name for v in model.graph.outputs]}. Expected "
        f"{LOGITS.name!r} among them; trace the draft's body before its sampling is added."
    )


def _draft_vocab(logits: ir.Value, d2t: np.ndarray | None) -> int:
    size = logits.shape[2] if logits.shape is not None and len(logits.shape) == 3 else None
    if not isinstance(size, int) or logits.dtype != ir.DataType.FLOAT:
        raise BuildError(
            f"draft logits: received {logits.dtype} {logits.shape}. Expected FLOAT "
            "[batch, 1, draft_vocab] with a fixed draft_vocab; cast and slice before sampling."
        )
    if d2t is not None:
        check_length(d2t, size)
    return size
