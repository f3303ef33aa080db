"""The sampling tail of a draft step: from the draft's logits to one token and q.

q is returned as it was sampled from, after every transform: q taken earlier inflates acceptance and
bends the output's law (bugs 1). Invariant: `draft_token` is drawn from `draft_step_probs` and from
nothing else; a greedy row's q is one-hot.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass
from onnxscript import GraphBuilder

from runtime.contract import DRAFT_STEP_PROBS, DRAFT_TOKEN, DRAFT_UNIFORMS, LOGITS, SAMPLING
from runtime.errors import BuildError

from .control_flow import Op, Values, f32, i64, when
from .draft_vocabulary import check_length
from .draw_graph import draw
from .graph_signature import name_outputs, typed
from .sampling_inputs import Sampling, any_sampled
from .transforms_graph import transformed


def append_draft_sampling(
    model: ir.Model,
    d2t: np.ndarray | None = None,  # [draft_vocab] int64, target id = i + d2t[i]
) -> None:
    """Replace the output `logits` [batch, 1, draft_vocab] f32 by the sampled token and q.

    Raises BuildError where there is no such output, VocabularyMismatch for another draft's map.
    """
    position, logits = _logits(model)
    size = _draft_vocab(logits, d2t)
    builder = GraphBuilder(model.graph)
    builder.push_module("draft_sampling")
    inputs = [builder.input(s.name, *typed(s, {})) for s in (DRAFT_UNIFORMS, *SAMPLING)]
    token, probs = _sample(builder.op, logits, *inputs, size=size)
    outputs = [_target_ids(builder.op, token, d2t), builder.op.Identity(probs)]
    name_outputs(outputs, (DRAFT_TOKEN, DRAFT_STEP_PROBS), {"draft_vocab": size})
    model.graph.outputs[position : position + 1] = outputs
    NameFixPass()(model)


def _sample(
    op: Op,
    logits: ir.Value,  # [batch, 1, draft_vocab] f32
    uniforms: ir.Value,  # [batch] f32
    *parameters: ir.Value,  # temperature, top_k, top_p, min_p: [batch]
    size: int,
) -> Values:
    """Token of the draft vocabulary [batch, 1] int64, and q [batch, 1, draft_vocab] f32."""
    best = op.ArgMax(logits, axis=2, keepdims=0)
    greedy = [best, op.OneHot(best, size, [0.0, 1.0], axis=-1)]

    def sampled(inner: Op) -> Values:
        law = transformed(inner, logits, Sampling.of(inner, *parameters, vocab=size))
        is_greedy, q = law.sampling.greedy, law.p(inner, logits)
        u = inner.Unsqueeze(uniforms, [1])
        token = draw(inner, inner.Squeeze(q, [1]), u, size=size)
        token = inner.Where(inner.Squeeze(is_greedy, [2]), best, token)
        return [token, inner.Where(is_greedy, greedy[1], q)]

    wanted = any_sampled(op, parameters[0])
    return when(op, wanted, greedy, sampled, [i64("batch", 1), f32("batch", 1, size)])


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
