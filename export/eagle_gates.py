"""Does a written head compute what the eager head does, from the target's states and on its own?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.contract import eagle_graph, fuse_graph
from runtime.errors import GateFailed
from runtime.executor import EngineOptions, Executor, cache_buffers
from runtime.manifest import Gate
from runtime.sampling import SamplingParams
from runtime.sampling_inputs import SamplingInputs

from . import gates
from .eagle_graph import fuse_precision
from .eagle_head import EagleHead
from .eagle_module import eager_fuse, eager_module
from .graphs import WrittenGraph
from .precision import Precision
from .tolerances import EAGER

Array = NDArray[Any]

OWN_STEPS = 4  # behind the rows that start from the target's states


@dataclass(frozen=True, kw_only=True)
class QShape:
    """Where the head's tokens are in a row of q; None: as they come."""

    size: int
    columns: Array | None


def head_parity(
    head: EagleHead,
    written: WrittenGraph,
    precision: Precision,
    rounded: frozenset[str],
    onnx: Path,
    tokens: list[int],
    features: Array,  # [len(tokens), feature_width] of the target at these tokens
    shape: QShape,
) -> Gate:
    """The graphs in f32 arithmetic against the eager head with the same rounded weights.

    The last OWN_STEPS rows are the head's own steps, each from the state that it gave before.
    Skipped, with the reason, where the eager head doesn't fit into memory. Raises GateFailed.
    """
    free, needed = gates.available_bytes(), _eager_bytes(head)
    if needed > free:
        reason = (
            f"the eager head needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
        )
        return Gate(name="draft parity", status="skipped", reason=reason)
    graph = _graph_rows(head, written, onnx, tokens, features, shape)
    eager = _eager_rows(head, precision, rounded, tokens, features)
    width = graph.shape[1]  # the target's ids alone are drawn
    error = gates.relative_error(*(_laws(rows, width) for rows in (graph, eager)))
    figures: gates.Figures = {
        "relative_error": error,
        "limit": EAGER,
        "rows": len(graph),
        "own_steps": OWN_STEPS,
    }
    if not error <= EAGER:
        raise GateFailed(
            f"gate draft parity: received a relative error of {error:.3g} against the eager head "
            f"with the same weights. Expected at most {EAGER:g}; this head isn't exported rightly: "
            "please report it with its config.json."
        )
    return Gate(name="draft parity", status="passed", figures=figures)


def _eager_bytes(head: EagleHead) -> int:
    return 4 * sum(int(np.prod(shape)) for shape in head.shapes().values())


def _laws(rows: Array, width: int) -> Array:
    """Logarithms of a law's rows, centred."""
    rows = rows[:, :width].astype(np.float64)
    return rows - rows.mean(-1, keepdims=True)


@torch.inference_mode()
def _eager_rows(
    head: EagleHead,
    precision: Precision,
    rounded: frozenset[str],
    tokens: Sequence[int],
    features: Array,
) -> Array:
    """log q of the row of the last true pair and of each own step: [1 + OWN_STEPS, D]."""
    module = eager_module(head)
    states = torch.from_numpy(np.array(features[None, : _true_pairs(tokens)]))
    if head.version == 3:
        fuse = eager_fuse(head)
        _round(fuse, fuse_precision(precision), rounded)
        states = fuse(states)
    _round(module, precision, rounded)
    found = []
    for _ in range(1 + OWN_STEPS):
        count = states.shape[1]
        ids = torch.tensor([list(tokens[1 : 1 + count])])
        logits, own = module(ids, states, torch.arange(count)[None])
        found.append(_log(torch.softmax(logits[0, 0], -1).numpy()))
        states = torch.cat([states, own[:, -1:]], dim=1)
    return np.stack(found)


def _round(module: torch.nn.Module, precision: Precision, rounded: frozenset[str]) -> None:
    for name, parameter in module.named_parameters():
        if name in rounded:
            parameter.copy_(torch.from_numpy(precision.rounded(parameter.numpy())))


def _true_pairs(tokens: Sequence[int]) -> int:
    return len(tokens) - 1 - OWN_STEPS


def _graph_rows(
    head: EagleHead,
    written: WrittenGraph,
    onnx: Path,
    tokens: Sequence[int],
    features: Array,
    shape: QShape,
) -> Array:
    """The same rows of the written graphs; the true pairs are read in two calls."""
    pairs = _true_pairs(tokens)
    states = np.ascontiguousarray(features[None, :pairs], np.float32)
    if head.version == 3:
        states = _fused(onnx / "fuse.onnx", states, head.config.hidden_size)
    with gates.exact_arithmetic(onnx / "draft.onnx") as variant:
        graph = _HeadGraph(variant, written, head.config.hidden_size, shape.size)
        half = pairs // 2
        graph.step(tokens[1 : 1 + half], states[:, :half])
        rows = [graph.step(tokens[1 + half : 1 + pairs], states[:, half:])]
        for i in range(OWN_STEPS):
            rows.append(graph.step([tokens[1 + pairs + i]], graph.state))
    q = np.stack(rows) if shape.columns is None else np.stack(rows)[:, shape.columns]
    return _log(q)


def _log(q: Array) -> Array:
    """With a floor: what f32 can't tell from 0 isn't compared."""
    return np.log(q + np.float32(1e-30))


def _fused(path: Path, features: Array, width: int) -> Array:
    states = np.zeros((1, features.shape[1], width), np.float32)
    with gates.exact_arithmetic(path) as variant:
        fuse = Executor.load(variant, fuse_graph(), EngineOptions(spin=False))
        fuse.bind({"features": features}, {"states": states}).run()
    return states


class _HeadGraph:
    """The head's graph, asked for q at temperature 1: its own law, no transform."""

    def __init__(self, path: Path, written: WrittenGraph, width: int, q_size: int) -> None:
        self._executor = Executor.load(path, eagle_graph(written.cache), EngineOptions(spin=False))
        self._sampling = SamplingInputs(self._executor.axes["vocab"], rows=1)
        self._sampling.begin(SamplingParams(temperature=1.0), ())
        self._past = cache_buffers(written.cache.past(), written.cache.shape(1))
        pairs = zip(written.cache.past(), written.cache.present(), strict=True)
        self._present = {after.name: self._past[before.name] for before, after in pairs}
        self._vocab, self._length = q_size, 0
        self._token = np.zeros((1, 1), np.int64)
        self.state = np.zeros((1, 1, width), np.float32)

    def step(self, token_ids: Sequence[int], states: Array) -> Array:
        """Append pairs; q [D] of the last, whose own state is `state` then."""
        q, state = np.zeros((1, 1, self._vocab), np.float32), np.zeros_like(self.state)
        inputs: dict[str, Array] = {
            "input_ids": np.array([token_ids], np.int64),
            "states": np.ascontiguousarray(states),
            "past_lengths": np.array([self._length], np.int32),
            "draft_uniforms": np.zeros(1, np.float32),
            "drafted_tokens": np.zeros((1, 0), np.int64),
            "allowed_tokens": self._sampling.allowed,
            **self._sampling.shared,
            **self._past,
        }
        outputs: dict[str, Array] = {
            "draft_token": self._token,
            "draft_step_probs": q,
            "next_state": state,
            **self._present,
        }
        self._executor.bind(inputs, outputs).run()
        self._length += len(token_ids)
        self.state = state
        return q[0, 0]
