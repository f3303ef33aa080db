"""A written graph, run row by row as gates need it: caches in the open, lengths set by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.contract import CacheSpec, GraphSpec, TensorSpec, draft_graph, target_graph
from runtime.executor import EngineOptions, Executor, cache_buffers
from runtime.sampling import SamplingParams
from runtime.sampling_inputs import SamplingInputs
from runtime.tree_buffers import chain_inputs

Array = NDArray[Any]


class GateGraph:
    """The target graph over caches of its own: `length` rows are valid, fewer is a rollback."""

    def __init__(
        self,
        path: Path,
        cache: CacheSpec,
        vocab_size: int,
        switches: Mapping[TensorSpec, Array] = MappingProxyType({}),
    ) -> None:
        spec = replace(self._spec(cache), switches=tuple(switches))
        self._executor = Executor.load(path, spec, self._options())
        self._cache, self._vocab = cache, vocab_size
        #: the target's hidden states at the rows of the last call: [rows, feature_width]
        self.features = np.zeros((0, self._executor.axes.get("feature_width", 0)), np.float32)
        self._switches = {one.name: value for one, value in switches.items()}
        self.length = 0
        self.reset()

    def reset(self) -> None:
        """Fresh caches, nothing committed."""
        self._past = cache_buffers(self._cache.past(), self._cache.shape(1))
        pairs = zip(self._cache.past(), self._cache.present(), strict=True)
        self._present = {present.name: self._past[past.name] for past, present in pairs}
        self.length = 0

    def rows(self, tokens: Sequence[int]) -> Array:
        """Append `tokens`; returns their logits [len(tokens), vocab] f32."""
        count = len(tokens)
        logits = np.zeros((1, count, self._vocab), np.float32)
        inputs: dict[str, Array] = {
            "input_ids": np.array([tokens], np.int64),
            "past_lengths": np.array([self.length], np.int32),
            "num_logits": np.array(count, np.int64),
            **chain_inputs(count),
            **self._switches,
            **self._past,
        }
        outputs = {"logits": logits, **self._present}
        if self.features.shape[1]:
            self.features = np.zeros((count, self.features.shape[1]), np.float32)
            outputs["features"] = self.features[None]
        self._executor.bind(inputs, outputs).run()
        self.length += count
        return logits[0]

    def in_chunks(self, tokens: Sequence[int]) -> Array:
        """A clean run over `tokens` in two chunks: [len(tokens), vocab] f32."""
        self.reset()
        half = len(tokens) // 2
        return np.concatenate([self.rows(tokens[:half]), self.rows(tokens[half:])])

    @staticmethod
    def _spec(cache: CacheSpec) -> GraphSpec:
        return target_graph(cache)

    @staticmethod
    def _options() -> EngineOptions:
        return EngineOptions(spin=False)


class DraftGateGraph:
    """The draft graph, asked for q at temperature 1: its own law, no transform."""

    def __init__(self, path: Path, cache: CacheSpec, vocab_size: int) -> None:
        self._executor = Executor.load(path, draft_graph(cache), EngineOptions(spin=False))
        self._sampling = SamplingInputs(self._executor.axes["vocab"], rows=1)
        self._sampling.begin(SamplingParams(temperature=1.0), ())
        self._cache, self._vocab = cache, vocab_size

    def probs(self, tokens: Sequence[int]) -> Array:
        """q behind each prefix of `tokens`, read one token at a time: [len(tokens), D] f32.

        Of a draft padded beyond its target only the target's ids, which alone are drawn.
        """
        past = cache_buffers(self._cache.past(), self._cache.shape(1))
        pairs = zip(self._cache.past(), self._cache.present(), strict=True)
        present = {p.name: past[q.name] for q, p in pairs}
        return np.stack([self._step(t, i, past, present) for i, t in enumerate(tokens)])

    def _step(
        self, token: int, length: int, past: dict[str, Array], present: dict[str, Array]
    ) -> Array:
        q = np.zeros((1, 1, self._vocab), np.float32)
        inputs: dict[str, Array] = {
            "input_ids": np.array([[token]], np.int64),
            "past_lengths": np.array([length], np.int32),
            "draft_uniforms": np.zeros(1, np.float32),
            "drafted_tokens": np.zeros((1, 0), np.int64),
            "allowed_tokens": self._sampling.allowed,
            **self._sampling.shared,
            **past,
        }
        outputs: dict[str, Array] = {
            "draft_token": np.zeros((1, 1), np.int64),
            "draft_step_probs": q,
            **present,
        }
        self._executor.bind(inputs, outputs).run()
        return q[0, 0, : self._executor.axes["vocab"]]
