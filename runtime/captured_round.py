"""A whole round as one program: k draft steps, verification, acceptance; one copy each way.

Nothing of a call is in the program but its shapes: tokens, lengths, uniforms and the sampling
parameters are tensors of one arena, which the host fills before each launch. The first draft step
always reads the last two tokens: where the draft knows the first of them already, it writes the
same row again, and a round has one form whether all drafts were accepted before or not.

For requests without adjustments and constraints, whose tables nothing reads then; others take the
steps one by one (`runtime.round`). Invariant: every host field is written before every launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .arena import Allocate, Arena, Field
from .captured_programs import CapturedPrograms, Program, RoundShape
from .errors import EngineError
from .executor import Buffers
from .outcome import Outcome
from .sampling import SamplingParams
from .sampling_inputs import LEAST_TOP_P
from .tree import Tree
from .tree_buffers import TreeBuffers, chain_inputs
from .uniforms import ACCEPT, DRAFT, DRAW

Array = NDArray[Any]


class Bound(Protocol):
    def run(self) -> float: ...


class Binds(Protocol):
    """The executor protocol: an engine that prepares calls on fixed arrays."""

    def bind(self, inputs: Buffers, outputs: Buffers) -> Bound: ...


@dataclass(frozen=True, kw_only=True)
class RoundEngines:
    """The three executors, and the caches that they share with prefill, by input name."""

    target: Binds
    draft: Binds
    accept: Binds
    target_caches: Mapping[str, Array]
    draft_caches: Mapping[str, Array]


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


@dataclass(frozen=True, kw_only=True)
class RoundInputs:
    """What one round is told: all that may differ from the one before.

    tokens: the committed ones, at least two. draft_rows: rows of the draft's cache that stand for
    all of them but the last two, which it must have read (`DraftModel.catch_up`).
    """

    tokens: Sequence[int]
    draft_rows: int
    uniforms: Array  # [purpose, position] f32
    params: SamplingParams

    def fill(self, arena: Arena, k: int, vocab: int) -> None:
        """Write every host field, and the block's first two tokens."""
        committed = len(self.tokens)
        arena["target_lengths"][0] = committed - 1
        arena["draft_lengths"][:] = self.draft_rows + 1 + np.arange(k)
        arena["draft_lengths"][:1] = self.draft_rows
        here = slice(committed, committed + k)
        arena["draft_uniforms"][:] = self.uniforms[DRAFT, here]
        arena["accept_uniforms"][0] = self.uniforms[ACCEPT, here]
        arena["draw_uniforms"][0] = self.uniforms[DRAW, committed : committed + k + 1]
        fill_parameters(arena, self.params, vocab)
        arena["block"][0, :2] = self.tokens[-2:]


class RoundProgram:
    """The arena, the calls and the program of one shape.

    Making a program may run its calls, on the inputs as they are then: so they are those of the
    round that it is made for, and write no cache row that is valid.
    """

    def __init__(
        self,
        shape: RoundShape,
        engines: RoundEngines,
        inputs: RoundInputs,
        *,
        vocab: int,
        draft_vocab: int,
        allocate: Allocate,
        make: MakeProgram,
    ) -> None:
        self.shape = shape
        self.arena = _arena(shape.drafts, allocate)
        self._engines = engines
        self._chain = TreeBuffers.of(Tree.chain(shape.drafts))
        self._tables = neutral_tables(vocab, shape.drafts + 1)
        self._logits = np.zeros((1, shape.drafts + 1, vocab), np.float32)
        self._q = np.zeros((1, shape.drafts, draft_vocab), np.float32)
        inputs.fill(self.arena, shape.drafts, vocab)
        calls = [*map(self._draft, range(shape.drafts)), self._verify(), self._accept()]
        self._program = make(calls, shape.context, self.arena.up, self.arena.down)

    def run(self) -> float:
        return self._program.run()

    def _draft(self, step: int) -> Bound:
        a = self.arena
        inputs = {
            "input_ids": a["block"][:, :2] if step == 0 else a["block"][:, step + 1 : step + 2],
            "past_lengths": a["draft_lengths"][step : step + 1],
            "draft_uniforms": a["draft_uniforms"][step : step + 1],
            "drafted_tokens": a["block"][:, 2 : 2 + step],
            "allowed_tokens": self._tables["allowed_tokens"][:, :1],
            **self._sampling(),
            **self._engines.draft_caches,
        }
        outputs = {
            "draft_token": a["block"][:, step + 2 : step + 3],
            "draft_step_probs": self._q[:, step : step + 1],
            **present(self._engines.draft_caches),
        }
        return self._engines.draft.bind(inputs, outputs)

    def _verify(self) -> Bound:
        rows = self.shape.drafts + 1
        inputs = {
            "input_ids": self.arena["block"][:, 1 : 1 + rows],
            "past_lengths": self.arena["target_lengths"],
            "num_logits": np.array(rows, np.int64),
            **chain_inputs(rows),
            **self._engines.target_caches,
        }
        outputs = {"logits": self._logits, **present(self._engines.target_caches)}
        return self._engines.target.bind(inputs, outputs)

    def _accept(self) -> Bound:
        a = self.arena
        inputs = {
            "logits": self._logits,
            "draft_tokens": a["block"][:, 2:],
            "draft_probs": self._q,
            "parents": self._chain.parents,
            "q_rows": np.arange(self.shape.drafts)[None],
            "visible": self._chain.visible,
            "accept_uniforms": a["accept_uniforms"],
            "draw_uniforms": a["draw_uniforms"],
            "past_lengths": a["target_lengths"],
            "allowed_tokens": self._tables["allowed_tokens"],
            **self._sampling(),
        }
        return self._engines.accept.bind(inputs, {one.name: a[one.name] for one in DECIDED})

    def _sampling(self) -> dict[str, Array]:
        """Parameters from the arena; tables that stay neutral for good."""
        tables = {k: v for k, v in self._tables.items() if k != "allowed_tokens"}
        return {one.name: self.arena[one.name] for one in PARAMETERS} | tables


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


def fill_parameters(arena: Arena, params: SamplingParams, vocab: int) -> None:
    arena["temperature"][0] = params.temperature
    arena["top_k"][0] = min(params.top_k, vocab)
    arena["top_p"][0] = max(params.top_p, LEAST_TOP_P)
    arena["min_p"][0] = params.min_p


def _arena(k: int, allocate: Allocate) -> Arena:
    f32, i32, i64 = np.float32, np.int32, np.int64
    return Arena(
        host=(
            Field(name="target_lengths", shape=(1,), dtype=i32),
            Field(name="draft_lengths", shape=(k,), dtype=i32),
            Field(name="draft_uniforms", shape=(k,), dtype=f32),
            Field(name="accept_uniforms", shape=(1, k), dtype=f32),
            Field(name="draw_uniforms", shape=(1, k + 1), dtype=f32),
            *PARAMETERS,
        ),
        shared=(Field(name="block", shape=(1, k + 2), dtype=i64),),
        round=DECIDED,
        allocate=allocate,
    )


def neutral_tables(vocab: int, rows: int) -> dict[str, Array]:
    """Of a request without adjustments, for so many rows."""
    return {
        "adjust": np.zeros((1,), np.bool_),
        "repetition_penalty": np.ones((1,), np.float32),
        "presence_penalty": np.zeros((1,), np.float32),
        "frequency_penalty": np.zeros((1,), np.float32),
        "logit_bias": np.zeros((1, vocab), np.float32),
        "seen_tokens": np.zeros((1, vocab), np.bool_),
        "output_counts": np.zeros((1, vocab), np.float32),
        "allowed_tokens": np.ones((1, rows, vocab), np.bool_),
    }


def present(caches: Mapping[str, Array]) -> dict[str, Array]:
    """The same arrays as outputs: they are written in place."""
    return {name.replace("past_key_values", "present"): array for name, array in caches.items()}


class CapturedRounds:
    """Rounds of a chain, each launched as one program."""

    def __init__(
        self,
        engines: RoundEngines,
        *,
        vocab: int,
        draft_vocab: int,
        contexts: Sequence[int],
        free_bytes: Callable[[], int],
        reserve_bytes: int = 0,
        allocate: Allocate,
        make: MakeProgram,
    ) -> None:
        self._vocab = vocab
        self._inputs: RoundInputs | None = None  # of the round that is about to run

        def captured(shape: RoundShape) -> RoundProgram:
            if self._inputs is None:
                raise EngineError("a program was asked for without a round. Expected `run`.")
            return RoundProgram(
                shape, engines, self._inputs, vocab=vocab, draft_vocab=draft_vocab,
                allocate=allocate, make=make,
            )  # fmt: skip

        self.programs = CapturedPrograms(
            captured, contexts, free_bytes=free_bytes, reserve_bytes=reserve_bytes
        )

    def run(self, inputs: RoundInputs, k: int) -> Outcome:
        """One round of k drafts behind the committed tokens. Raises EngineError."""
        rows = len(inputs.tokens) + k
        self._inputs = inputs
        found = self.programs.program(batch=1, drafts=k, rows=rows)
        inputs.fill(found.arena, k, self._vocab)
        seconds = found.run()
        arena = found.arena
        accepted = int(arena["num_accepted"][0])
        drafts = arena["block"][0, 2 : 2 + accepted].tolist()
        return Outcome(
            num_drafted=k,
            num_accepted=accepted,
            tokens=(*drafts, int(arena["next_token"][0])),
            draft_s=0.0,
            verify_s=seconds,  # the round is one piece: its parts can't be told apart
            accept_s=0.0,
        )
