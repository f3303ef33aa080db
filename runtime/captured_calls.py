"""The calls that every captured program has, whatever drafts: verification and acceptance.

Their inputs are fields of the program's arena, or arrays of its own that nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .arena import Arena, Field
from .captured_programs import Program
from .executor import Buffers
from .sampling import SamplingParams
from .sampling_inputs import LEAST_TOP_P
from .tree_buffers import TreeBuffers

Array = NDArray[Any]


class Bound(Protocol):
    def run(self) -> float: ...


class Binds(Protocol):
    """The executor protocol: an engine that prepares calls on fixed arrays."""

    def bind(self, inputs: Buffers, outputs: Buffers) -> Bound: ...


class DecidingEngines(Protocol):
    """The two executors, and the caches that the target shares with prefill, by input name."""

    @property
    def target(self) -> Binds: ...
    @property
    def accept(self) -> Binds: ...
    @property
    def target_caches(self) -> Mapping[str, Array]: ...


# Turns a round's calls into one program: `up` is copied before them, `down` after them.
MakeProgram = Callable[[Sequence[Bound], int, Array, Array], Program]


class Sequential:
    """The calls one by one: what a captured program must not differ from."""

    def __init__(self, calls: Sequence[Bound]) -> None:
        self._calls = calls

    def run(self) -> float:
        return sum(call.run() for call in self._calls)


def sequentially(calls: Sequence[Bound], _context: int, _up: Array, _down: Array) -> Program:
    """For engines that run where the host does: there is nothing to copy."""
    return Sequential(calls)


#: what a request sets, and what acceptance tells
PARAMETERS = (
    Field(name="temperature", shape=(1,), dtype=np.float32),
    Field(name="top_k", shape=(1,), dtype=np.int64),
    Field(name="top_p", shape=(1,), dtype=np.float32),
    Field(name="min_p", shape=(1,), dtype=np.float32),
)
DECIDED = (
    Field(name="num_accepted", shape=(1,), dtype=np.int64),
    Field(name="next_token", shape=(1,), dtype=np.int64),
    Field(name="last_row", shape=(1,), dtype=np.int64),
    Field(name="new_lengths", shape=(1,), dtype=np.int32),
)


class Decision:
    """Of an arena with `target_lengths`, uniforms, PARAMETERS and DECIDED."""

    def __init__(
        self,
        arena: Arena,
        query: Array,
        tree: TreeBuffers,
        *,
        q_rows: Array,
        q: Array,
        vocab: int,
        given: Buffers = MappingProxyType({}),
    ) -> None:
        """query: [1, drafts + 1] i64, the last committed token and the drafts behind it.
        q_rows, q: what they were drawn from, as the accept graph is told. given: where the target
        puts what it gives for a head."""
        rows = query.shape[1]
        self._arena, self._query, self._tree = arena, query, tree
        self._q_rows, self.q = q_rows, q
        self.logits = np.zeros((1, rows, vocab), np.float32)
        self.tables = _neutral_tables(vocab)
        self._allowed = np.ones((1, rows, vocab), np.bool_)
        self._given = given

    def calls(self, engines: DecidingEngines) -> list[Bound]:
        return [self._verify(engines), self._accept(engines)]

    def sampling(self) -> dict[str, Array]:
        """Parameters from the arena; tables that stay neutral for good."""
        return {one.name: self._arena[one.name] for one in PARAMETERS} | self.tables

    def allowed(self, rows: int) -> Array:
        """Of so many rows: all."""
        return self._allowed[:, :rows]

    def _verify(self, engines: DecidingEngines) -> Bound:
        inputs = {
            "input_ids": self._query,
            "past_lengths": self._arena["target_lengths"],
            "num_logits": np.array(self._query.shape[1], np.int64),
            **self._tree.inputs(),
            **engines.target_caches,
        }
        outputs = {"logits": self.logits, **present(engines.target_caches), **self._given}
        return engines.target.bind(inputs, outputs)

    def _accept(self, engines: DecidingEngines) -> Bound:
        a = self._arena
        inputs = {
            "logits": self.logits,
            "draft_tokens": self._query[:, 1:],
            "draft_probs": self.q,
            "parents": self._tree.parents,
            "q_rows": self._q_rows,
            "visible": self._tree.visible,
            "accept_uniforms": a["accept_uniforms"],
            "draw_uniforms": a["draw_uniforms"],
            "past_lengths": a["target_lengths"],
            "allowed_tokens": self._allowed,
            **self.sampling(),
        }
        return engines.accept.bind(inputs, {one.name: a[one.name] for one in DECIDED})


def of_certain(
    arena: Arena,
    query: Array,
    tree: TreeBuffers,
    *,
    vocab: int,
    draft_vocab: int,
    given: Buffers = MappingProxyType({}),
) -> Decision:
    """Over drafts that were ranked or looked up, and not drawn: no row of q is read."""
    q = np.zeros((1, 1, draft_vocab), np.float32)
    q_rows = np.full((1, query.shape[1] - 1), -1, np.int64)
    return Decision(arena, query, tree, q_rows=q_rows, q=q, vocab=vocab, given=given)


def fill_parameters(arena: Arena, params: SamplingParams, vocab: int) -> None:
    arena["temperature"][0] = params.temperature
    arena["top_k"][0] = min(params.top_k, vocab)
    arena["top_p"][0] = max(params.top_p, LEAST_TOP_P)
    arena["min_p"][0] = params.min_p


def present(caches: Mapping[str, Array]) -> dict[str, Array]:
    """The same arrays as outputs: they are written in place."""
    return {name.replace("past_key_values", "present"): array for name, array in caches.items()}


def _neutral_tables(vocab: int) -> dict[str, Array]:
    """Of a request without adjustments."""
    return {
        "adjust": np.zeros((1,), np.bool_),
        "repetition_penalty": np.ones((1,), np.float32),
        "presence_penalty": np.zeros((1,), np.float32),
        "frequency_penalty": np.zeros((1,), np.float32),
        "logit_bias": np.zeros((1, vocab), np.float32),
        "seen_tokens": np.zeros((1, vocab), np.bool_),
        "output_counts": np.zeros((1, vocab), np.float32),
    }
