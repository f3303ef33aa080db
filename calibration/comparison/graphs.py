"""A bundle's target and draft, run by hand: caches in the open, lengths set by the caller.

Invariant: the first `length` rows of a cache are valid; a smaller length is a rollback. Equal calls
on equal bundles give equal bits, which is why a bundle compared with itself differs by nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import Bundle
from runtime.contract import CacheSpec, GraphSpec, draft_graph, target_graph
from runtime.errors import EngineError
from runtime.executor import Call, EngineOptions, Executor, cache_buffers
from runtime.reference import draw
from runtime.tree_buffers import chain_inputs

from .law import law
from .neutral import neutral_inputs

Array = NDArray[Any]

CHUNK = 64  # rows a call: bounds the memory that logits take
MOST_CALLS = 16  # bound and kept
SUM_SLACK = 0.01  # q further from a sum of 1 is no distribution


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
        self,
        path: Path,
        spec: GraphSpec,
        cache: CacheSpec,
        sizes: Mapping[str, int],
        options: EngineOptions,
    ) -> None:
        self._executor = Executor.load(path, spec, options)
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
    """Logits of a bundle's target."""

    def __init__(self, bundle: Bundle, options: EngineOptions) -> None:
        card = bundle.manifest.target
        self.vocab = card.vocab_size
        self._path = bundle.path
        path, spec = bundle.model_path("target"), target_graph(card.cache)
        self.graph = CachedGraph(path, spec, card.cache, {"vocab": self.vocab}, options)

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
        start = self.graph.length
        self.graph.run(tokens, {"num_logits": np.array(num_logits, np.int64)}, {"logits": logits})
        if not np.isfinite(logits).all():
            rows = f"logits that are not finite, in rows {start} to {self.graph.length - 1}"
            raise NonFinite(self._path, "target", rows, "--precision")
        return logits[0]


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """What one step drew, and what it drew it from."""

    token: int  # target id
    q: Array  # [len(DraftGraph.ids)] f64


class Drafter(Protocol):
    """What drafts a round's tokens, over a cache of its own. ids: [D], ascending."""

    @property
    def ids(self) -> Array: ...

    def read(self, tokens: Sequence[int]) -> None: ...

    def step(self, tokens: Sequence[int], temperature: float, uniform: float) -> DraftStep: ...


class TargetAsDraft:
    """A target that drafts for another one: the quantized one is nearly always accepted."""

    def __init__(self, target: TargetGraph) -> None:
        self._target = target
        self.ids: Array = np.arange(target.vocab)

    def read(self, tokens: Sequence[int]) -> None:
        self._target.read(tokens)

    def step(self, tokens: Sequence[int], temperature: float, uniform: float) -> DraftStep:
        q = law(self._target.rows(tokens)[-1], temperature)
        return DraftStep(token=draw(q, uniform), q=q)


class DraftGraph:
    """Tokens and q of a bundle's draft.

    ids: [D] the target id of each entry of q, ascending; entries that the target doesn't know (a
    padded draft) are left out.
    """

    def __init__(self, bundle: Bundle, options: EngineOptions) -> None:
        card, vocab = bundle.manifest.draft_model, bundle.manifest.target.vocab_size
        assert card is not None  # sides without a draft are refused before
        self._size = bundle.manifest.draft_vocab_size
        self._path = bundle.path
        ids = np.arange(self._size) if bundle.d2t is None else np.arange(self._size) + bundle.d2t
        self.ids: Array = ids[ids < vocab]
        path, spec = bundle.model_path("draft"), draft_graph(card.cache)
        self.graph = CachedGraph(path, spec, card.cache, {"vocab": vocab}, options)

    def read(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the cache."""
        for start in range(0, len(tokens), CHUNK):
            self._run(tokens[start : start + CHUNK], 0.0, 0.0)

    def step(self, tokens: Sequence[int], temperature: float, uniform: float = 0.0) -> DraftStep:
        """Append `tokens`, few of them; one token drawn behind the last by `uniform`, and q."""
        token, q = self._run(tokens, temperature, uniform)
        if not abs(q.sum() - 1) < SUM_SLACK:  # false for NaN, too
            received = f"a q that sums to {q.sum()}, not 1, in row {self.graph.length - 1}"
            raise NonFinite(self._path, "draft", received, "--draft-precision")
        return DraftStep(token=token, q=q[: len(self.ids)])

    def _run(self, tokens: Sequence[int], temperature: float, uniform: float) -> tuple[int, Array]:
        token = np.zeros((1, 1), np.int64)
        q = np.zeros((1, 1, self._size), np.float32)
        values = {
            "temperature": np.array([temperature], np.float32),
            "draft_uniforms": np.array([uniform], np.float32),
        }
        self.graph.run(tokens, values, {"draft_token": token, "draft_step_probs": q})
        return int(token[0, 0]), q[0, 0].astype(np.float64)
