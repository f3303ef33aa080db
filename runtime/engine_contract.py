"""How the graphs behind TensorRT engines differ from the contract: sizes are lengths of inputs.

An engine's shapes are fixed when a call is bound. `num_logits` is the length of `logit_slots`, and
how many cache rows attention reads, that of `context_slots`; nobody reads what is in them.
"""

from __future__ import annotations

from dataclasses import replace

from .contract import NUM_LOGITS, GraphSpec, TensorSpec

LOGIT_SLOTS = TensorSpec(name="logit_slots", dtype="int32", axes=("num_logits",))
CONTEXT_SLOTS = TensorSpec(name="context_slots", dtype="int32", axes=("context",))
SHAPE_INPUTS = (LOGIT_SLOTS, CONTEXT_SLOTS)

LEAST_CONTEXT = 256  # rows of the smallest context bucket


def engine_spec(spec: GraphSpec) -> GraphSpec:
    """The signature of the engine that stands for a graph of the contract."""
    inputs = tuple(LOGIT_SLOTS if one == NUM_LOGITS else one for one in spec.inputs)
    if any(one.name.startswith("past_key_values.") for one in spec.inputs):
        inputs = (*inputs, CONTEXT_SLOTS)
    return replace(spec, inputs=inputs)


def context_buckets(max_context: int) -> tuple[int, ...]:
    """Ascending: doubling from the least, the whole cache last."""
    found, size = [], LEAST_CONTEXT
    while size < max_context:
        found.append(size)
        size *= 2
    return (*found, max_context)


def bucket_for(rows: int, max_context: int) -> int:
    """The least bucket that holds `rows` cache rows, those that the call writes among them."""
    for size in context_buckets(max_context):
        if rows <= size:
            return size
    raise ValueError(f"received {rows} rows. Expected at most max_context, {max_context}.")
