"""The end of a draft graph that makes trees: from logits of some rows to what they rank first.

No transform is applied: what a draft of a tree is worth to the target is decided by the accept
graph, whose law doesn't depend on how drafts were chosen; and a request's penalties move few of the
first ranks. Ids that the target lacks are never ranked.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass
from onnxscript import GraphBuilder

from runtime.contract import BRANCH_WIDTH, LOGITS, TOP_PROBS, TOP_TOKENS
from runtime.errors import BuildError

from .draft_vocabulary import DraftVocabulary
from .graph_signature import name_outputs

OPSET, IR_VERSION = 24, 10


def append_ranking(model: ir.Model, vocabulary: DraftVocabulary) -> None:
    """Replace the output `logits` [batch, num_logits, D] by `top_tokens` and `top_probs`.

    Raises BuildError for a vocabulary of fewer tokens than are ranked.
    """
    known = min(vocabulary.size, vocabulary.target_size)
    if known < BRANCH_WIDTH:
        raise BuildError(
            f"--max-tree-nodes: received a draft of {known} tokens. Expected at least "
            f"{BRANCH_WIDTH}, which a tree ranks; build with --max-tree-nodes 0."
        )
    position, logits = next(
        (i, value) for i, value in enumerate(model.graph.outputs) if value.name == LOGITS.name
    )
    builder = GraphBuilder(model.graph)
    builder.push_module("ranking")
    op = builder.op
    if vocabulary.size > vocabulary.target_size:
        logits = op.Slice(logits, [0], [vocabulary.target_size], [2])
    probs, tokens = op.TopK(
        op.Softmax(logits, axis=-1), [BRANCH_WIDTH], axis=-1, largest=1, sorted=1, _outputs=2
    )
    if vocabulary.d2t is not None:
        ids = op.initializer(ir.tensor(vocabulary.target_ids(), name="ranked_ids"))
        tokens = op.Gather(ids, tokens, axis=0)
    else:
        tokens = op.Identity(tokens)
    outputs = [tokens, op.Identity(probs)]
    name_outputs(outputs, (TOP_TOKENS, TOP_PROBS), {})
    model.graph.outputs[position : position + 1] = outputs
    NameFixPass()(model)


def rank_model(size: int, d2t: np.ndarray | None, target_vocab: int) -> ir.Model:
    """The ranking alone, behind logits [batch, num_logits, size] f32 that another graph made."""
    logits = ir.val(LOGITS.name, dtype=ir.DataType.FLOAT, shape=[*TOP_TOKENS.axes[:2], size])
    graph = ir.Graph([logits], [logits], nodes=[], opset_imports={"": OPSET}, name="rank")
    model = ir.Model(graph, ir_version=IR_VERSION)
    append_ranking(model, DraftVocabulary(target_size=target_vocab, size=size, d2t=d2t))
    return model
