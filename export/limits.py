"""What a build may promise: the batch, context and draft length that its two models bear.

The draft's context may be the shorter one: its cache window starts anew when it is full, while
the target's is the bundle's limit.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from runtime.contract import MOST_TREE_NODES
from runtime.errors import BuildError

from .draft_plan import DraftPlan

DEFAULT_MAX_CONTEXT = 2048
LEAST_CONTEXT = 16
# A round's cost is measured for each k when a bundle is built, and no draft pays that far ahead.
MOST_DRAFT_TOKENS = 64


def check_batch(asked: int) -> int:
    """Raises BuildError."""
    if asked != 1:
        raise BuildError(
            f"--max-batch: received {asked}. Expected 1: the runtime decodes one sequence at a "
            "time; load one decoder a sequence."
        )
    return asked


def target_context(asked: int | None, config: PretrainedConfig, name: str) -> int:
    """--max-context, or its default: never beyond the model's positions. Raises BuildError."""
    most = _positions(config)
    if asked is None:
        return min(DEFAULT_MAX_CONTEXT, most or DEFAULT_MAX_CONTEXT)
    if asked < LEAST_CONTEXT or (most is not None and asked > most):
        expected = f"{LEAST_CONTEXT} to {most}, the positions that {name} knows"
        if most is None:
            expected = f"at least {LEAST_CONTEXT}"
        raise BuildError(f"--max-context: received {asked}. Expected {expected}.")
    return asked


def draft_context(context: int, config: PretrainedConfig, name: str) -> int:
    """Rows of the draft's cache behind a target of `context`. Raises BuildError."""
    most = _positions(config)
    if most is not None and most < LEAST_CONTEXT:
        raise BuildError(
            f"--draft: received {name}, which knows {most} positions. Expected at least "
            f"{LEAST_CONTEXT}; use another draft."
        )
    return min(context, most or context)


def check_draft_tokens(asked: int, context: int) -> int:
    """context: the draft's; half of it is what it reads when it starts anew. Raises BuildError."""
    most = min(MOST_DRAFT_TOKENS, context // 2)
    if not 1 <= asked <= most:
        raise BuildError(
            f"-k: received {asked}. Expected 1 to {most} for a draft with a context of {context} "
            "tokens."
        )
    return asked


def _positions(config: PretrainedConfig) -> int | None:
    """Positions that the model was made for; None where its configuration states none."""
    return getattr(config, "max_position_embeddings", None)


def check_tree_nodes(asked: int, draft: DraftPlan | None, context: int) -> int:
    """Raises BuildError."""
    most = min(MOST_TREE_NODES, context // 2)
    if not 0 <= asked <= most:
        raise BuildError(f"--max-tree-nodes: received {asked}. Expected 0 to {most}.")
    if asked and (draft is None or not draft.makes_trees):
        name = draft.name if draft else "none"
        raise BuildError(
            f"--max-tree-nodes: received {asked} with --draft {name}. Expected 0: it makes chains "
            "only."
        )
    return asked
