"""The rows of q that gates ask of an EAGLE head's written graphs: caches in the open, its own law.

The last OWN_STEPS tokens are read as decoding would: each with the state that the head gave before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.contract import CacheSpec, GraphSpec, eagle_graph, fuse_graph
from runtime.executor import EngineOptions, Executor, cache_buffers
from runtime.sampling import SamplingParams
from runtime.sampling_inputs import SamplingInputs

Array = NDArray[Any]

OWN_STEPS = 4  # behind the rows that start from the target's states


@dataclass(frozen=True, kw_only=True)
class QShape:
    """Where the head's tokens are in a row of q; None: as they come."""

    size: int
    columns: Array | None = None


def true_pairs(tokens: Sequence[int]) -> int:
    return len(tokens) - 1 - OWN_STEPS


def log_law(q: Array) -> Array:
    """With a floor: what f32 can't tell from 0 isn't compared."""
    return np.log(q + np.float32(1e-30))


def graph_rows(
    graph: HeadGraph,
    tokens: Sequence[int],
    states: Array,  # [1, n, H], the target's, joined
    shape: QShape,
) -> Array:
    """log q [1 + OWN_STEPS, D] of the last true pair and of each own step; the true pairs are read
    in two calls."""
    pairs = true_pairs(tokens)
    half = pairs // 2
    graph.step(tokens[1 : 1 + half], states[:, :half])
    rows = [graph.step(tokens[1 + half : 1 + pairs], states[:, half:pairs])]
    for i in range(OWN_STEPS):
        rows.append(graph.step([tokens[1 + pairs + i]], graph.state))
    q = np.stack(rows) if shape.columns is None else np.stack(rows)[:, shape.columns]
    return log_law(q)


def joined(
    path: Path,
    features: Array,  # [1, n, feature_width]
    width: int,
    options: Callable[[], EngineOptions] = lambda: EngineOptions(spin=False),
) -> Array:
    """The states that an EAGLE-3 head starts from, by `fuse` at `path`: [1, n, width]."""
    states = np.zeros((1, features.shape[1], width), np.float32)
    fuse = Executor.load(path, fuse_graph(), options())
    fuse.bind({"features": np.ascontiguousarray(features)}, {"states": states}).run()
    return states


class HeadGraph:
    """The head's graph, asked for q at temperature 1: its own law, no transform."""

    def __init__(self, path: Path, cache: CacheSpec, width: int, q_size: int) -> None:
        self._executor = Executor.load(path, self._spec(cache), self._options())
        self._sampling = SamplingInputs(self._executor.axes["vocab"], rows=1)
        self._sampling.begin(SamplingParams(temperature=1.0), ())
        self._past = cache_buffers(cache.past(), cache.shape(1))
        pairs = zip(cache.past(), cache.present(), strict=True)
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
            **self._sizes(self._length + len(token_ids)),
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

    @staticmethod
    def _spec(cache: CacheSpec) -> GraphSpec:
        return eagle_graph(cache)

    @staticmethod
    def _options() -> EngineOptions:
        return EngineOptions(spin=False)

    def _sizes(self, rows: int) -> dict[str, Array]:
        """What says how many cache rows a call reads."""
        return {}
