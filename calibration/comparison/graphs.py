"""A bundle's target, run by hand: caches in the open, lengths set by the caller.

Invariant: the first `length` rows of a cache are valid; a smaller length is a rollback. Equal calls
on equal bundles give equal bits, which is why a bundle compared with itself differs by nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import Bundle
from runtime.contract import CacheSpec, GraphSpec, target_graph
from runtime.errors import EngineError
from runtime.executor import Call, Executor, cache_buffers
from runtime.features import FeatureStore
from runtime.tree_buffers import chain_inputs

from .neutral import neutral_inputs

Array = NDArray[Any]

CHUNK = 64  # rows a call: bounds the memory that logits take
MOST_CALLS = 16  # bound and kept


class NonFinite(EngineError):
    """A graph of the bundle at `path` gave NaN, infinity or no distribution."""

    def __init__(self, path: Path, graph: str, received: str, flag: str) -> None:
        super().__init__(
            f"{path.name}: {graph}: received {received}. Expected finite numbers; rebuild the "
            f"bundle with {flag} fp32, and if that does not help check the checkpoint's weights."
        )
        self.path = path


class CachedGraph:
    """One graph over caches of its own."""

    def __init__(
        self, executor: Executor, spec: GraphSpec, cache: CacheSpec, sizes: Mapping[str, int]
    ) -> None:
        self._executor = executor
        self._past = cache_buffers(cache.past(), cache.shape(1))
        pairs = zip(cache.past(), cache.present(), strict=True)
        self._present = {present.name: self._past[past.name] for past, present in pairs}
        others = [s for s in spec.inputs if s.name not in self._past and not s.optional]
        self._neutral = neutral_inputs(others, {"batch": 1, **sizes})
        self._calls: dict[tuple[Any, ...], _Bound] = {}
        self.max_context = cache.max_context
        self.length = 0

    def caches(self) -> Mapping[str, Array]:
        """By name, [1, kv_heads, max_context, head_dim]; rows from `length` on mean nothing."""
        return self._past

    def run(
        self, tokens: Sequence[int], values: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> None:
        """Append `tokens`; inputs that `values` doesn't set are neutral."""
        given: dict[str, Array] = {
            "input_ids": np.array([tokens], np.int64),
            "past_lengths": np.array([self.length], np.int32),
            **chain_inputs(len(tokens)),
            **values,
        }
        self._bound(given, outputs).run(given, outputs)
        self.length += len(tokens)

    def _bound(self, given: Mapping[str, Array], outputs: Mapping[str, Array]) -> _Bound:
        """Binding takes as long as a small graph runs: once for shapes that come again."""
        key = tuple((name, array.shape) for name, array in {**given, **outputs}.items())
        bound = self._calls.pop(key, None)
        if bound is None:
            own = {name: np.zeros_like(array) for name, array in {**given, **outputs}.items()}
            inputs = {**self._neutral, **self._past, **{name: own[name] for name in given}}
            results = {name: own[name] for name in outputs}
            call = self._executor.bind(inputs, {**results, **self._present})
            bound = _Bound(call=call, buffers=own)
        if len(self._calls) >= MOST_CALLS:
            del self._calls[next(iter(self._calls))]  # the one that was longest not used
        self._calls[key] = bound
        return bound


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """A call for certain shapes, over buffers of its own."""

    call: Call
    buffers: Mapping[str, Array]

    def run(self, given: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        for name, array in given.items():
            np.copyto(self.buffers[name], array)
        self.call.run()
        for name, array in outputs.items():
            np.copyto(array, self.buffers[name])


class TargetGraph:
    """Logits of a bundle's target; features: its states, where the bundle's drafter reads them."""

    def __init__(self, bundle: Bundle, executor: Executor) -> None:
        card = bundle.manifest.target
        self.vocab = card.vocab_size
        self._path = bundle.path
        spec = target_graph(card.cache)
        self.graph = CachedGraph(executor, spec, card.cache, {"vocab": self.vocab})
        width = bundle.manifest.feature_width
        self.features = FeatureStore(width, self.graph.max_context, CHUNK) if width else None

    def read(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the cache."""
        for start in range(0, len(tokens), CHUNK):
            self._run(tokens[start : start + CHUNK], 1)

    def rows(self, tokens: Sequence[int]) -> Array:
        """Append `tokens`; their logits [len(tokens), vocab] f32, all finite or EngineError."""
        starts = range(0, len(tokens), CHUNK)
        chunks = [tokens[start : start + CHUNK] for start in starts]
        return np.concatenate([self._run(chunk, len(chunk)) for chunk in chunks])

    def _run(self, tokens: Sequence[int], num_logits: int) -> Array:
        logits = np.zeros((1, num_logits, self.vocab), np.float32)
        start, outputs = self.graph.length, {"logits": logits}
        if self.features is not None:
            outputs["features"] = self.features.output(len(tokens))
        self.graph.run(tokens, {"num_logits": np.array(num_logits, np.int64)}, outputs)
        if self.features is not None:
            self.features.keep(start, len(tokens))
        if not np.isfinite(logits).all():
            rows = f"logits that are not finite, in rows {start} to {self.graph.length - 1}"
            raise NonFinite(self._path, "target", rows, "--precision")
        return logits[0]
