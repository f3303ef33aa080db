"""The gate of an engine's graph that makes trees: it ranks first what the draft finds likeliest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.contract import BRANCH_WIDTH, GraphSpec
from runtime.engine_contract import engine_spec
from runtime.errors import GateFailed
from runtime.executor import Executor, cache_buffers
from runtime.manifest import Gate
from runtime.tree_buffers import chain_inputs

from .draft_vocabulary import DraftVocabulary
from .engine_gates import AS_WRITTEN
from .engine_graphs import EngineGraph
from .gates import relative_error
from .tolerances import ROWS

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class BranchInputs:
    """What the graph reads of a chain; inputs, outputs: besides those of a draft model's."""

    tokens: Sequence[int]
    spec: GraphSpec
    inputs: Mapping[str, Array] = field(default_factory=dict)
    outputs: Mapping[str, Array] = field(default_factory=dict)


def branch_gates(
    graph: EngineGraph, probs: Array | None, vocabulary: DraftVocabulary, given: BranchInputs
) -> list[Gate]:
    """What is ranked first behind a chain is what `probs`, the draft's own q behind each token,
    has as its largest. Raises GateFailed."""
    if graph.exact is None or probs is None:
        return []
    count = len(probs)
    tops: dict[str, Array] = {
        "top_tokens": np.zeros((1, count, BRANCH_WIDTH), np.int64),
        "top_probs": np.zeros((1, count, BRANCH_WIDTH), np.float32),
    }
    past = cache_buffers(graph.exact_cache.past(), graph.exact_cache.shape(1))
    inputs: dict[str, Any] = {
        "input_ids": np.array([given.tokens[:count]], np.int64),
        "past_lengths": np.zeros(1, np.int32),
        "logit_slots": np.zeros(count, np.int32),
        "context_slots": np.zeros(count, np.int32),
        **chain_inputs(count),
        **given.inputs,
        **past,
    }
    present = {name.replace("past_key_values", "present"): one for name, one in past.items()}
    executor = Executor.load(graph.exact, engine_spec(given.spec), AS_WRITTEN)
    executor.bind(inputs, {**tops, **given.outputs, **present}).run()
    ids = vocabulary.target_ids()[: probs.shape[1]]
    return [ranking(tops["top_tokens"][0], tops["top_probs"][0], probs, ids)]


def ranking(
    tokens: Array,  # [rows, width] i64, target ids, the likeliest first
    top_probs: Array,  # [rows, width] f32
    probs: Array,  # [rows, n] f32: the draft's law behind the same rows
    ids: Array,  # [n] i64: target id of each column
) -> Gate:
    """Raises GateFailed."""
    width = tokens.shape[1]
    largest = -np.sort(-probs, axis=1)[:, :width]
    columns = {int(token): i for i, token in enumerate(ids)}
    own = np.array(
        [[p[columns[int(t)]] for t in row] for row, p in zip(tokens, probs, strict=True)]
    )
    error = max(relative_error(top_probs, largest), relative_error(own, largest))
    figures: dict[str, float | int | str] = {
        "relative_error": error,
        "limit": ROWS,
        "rows": len(tokens),
    }
    if not error <= ROWS:
        raise GateFailed(
            f"gate branch: received a ranking whose probabilities are {error:.3g} from the draft's "
            f"own. Expected at most {ROWS:g}; please report the model with its config.json."
        )
    return Gate(name="branch", status="passed", figures=figures)
