"""A whole round with a tree as one program: growth, verification, acceptance, and moving the rows.

For the static trees of a draft model. The tree's shape is in the program, which is made for it; of
a call nothing is: lengths, tokens, uniforms and sampling parameters are tensors of one arena. The
draft reads the last committed tokens, always as many as a round may commit: where it knows some of
them already, it writes the same rows again, and every round has one form. What it ranks becomes
drafts on the device (`tree_contract`), which also finds and moves the rows of the accepted path.

Invariant, as of the chains of `runtime.captured_round`: every host field is written before every
launch. Caches are left as the steps leave them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arena import Allocate, Arena, Field
from .captured_calls import (
    DECIDED,
    PARAMETERS,
    Binds,
    Bound,
    fill_parameters,
    of_certain,
    present,
)
from .captured_programs import RoundShape
from .capturing import Capturing
from .contract import BRANCH_WIDTH
from .errors import EngineError
from .growth import Growth, Level
from .outcome import Outcome
from .sampling import SamplingParams
from .tree import Tree
from .tree_buffers import TreeBuffers, chain_inputs
from .tree_contract import CACHES, PATH_ROWS, PLACED
from .uniforms import DRAW

Array = NDArray[Any]
MOST_TREES = 32  # programs are kept for good: the trees that come later take the steps


@dataclass(frozen=True, kw_only=True)
class WholeTreeEngines:
    """The executors, and the caches that they share with prefill, by input name.

    joined: all of the target's caches, each part [1, caches · heads, rows, size] as one call of
    `path` and `place` takes it.
    """

    target: Binds
    branch: Binds
    accept: Binds
    pick: Binds
    path: Binds
    place: Binds
    target_caches: Mapping[str, Array]
    draft_caches: Mapping[str, Array]
    joined: Sequence[Array]


@dataclass(frozen=True, kw_only=True)
class TreeInputs:
    """What one round is told: all that may differ from the one before.

    tokens: the committed ones, at least `Growth.reads`. draft_rows: rows of the draft's cache that
    stand for all of them but so many, which it must have read (`ModelBrancher.catch_up`).
    """

    tokens: Sequence[int]
    draft_rows: int
    uniforms: Array  # [purpose, position] f32
    params: SamplingParams

    def fill(self, arena: Arena, growth: Growth, vocab: int) -> None:
        """Write every host field, and the block's first token."""
        committed, depths = len(self.tokens), np.array(growth.tree.depths)
        arena["target_lengths"][0] = committed - 1
        arena["read"][0] = self.tokens[-growth.reads :]
        arena["draft_lengths"][0] = self.draft_rows
        behind = self.draft_rows + growth.reads
        arena["draft_lengths"][1:] = [behind + level.first for level in growth.levels]
        behind_parents = committed + depths[1:] - 1
        arena["accept_uniforms"][0] = self.uniforms[growth.purposes, behind_parents]
        arena["draw_uniforms"][0] = self.uniforms[DRAW, committed + depths]
        fill_parameters(arena, self.params, vocab)
        arena["block"][0, 0] = self.tokens[-1]


class WholeTreeProgram:
    """The arena, the calls and the program of one tree and one context.

    Making a program may run its calls, on the inputs as they are then: so they are those of the
    round that it is made for. Run twice they leave what one run leaves: each writes anew what the
    row moves of the one before wrote over.
    """

    def __init__(
        self,
        shape: RoundShape,
        engines: WholeTreeEngines,
        inputs: TreeInputs,
        *,
        vocab: int,
        draft_vocab: int,
        capturing: Capturing,
    ) -> None:
        self.growth = Growth(Tree(shape.parents))
        self.arena = _arena(self.growth, capturing.allocate)
        self._engines = engines
        ranked = self.growth.ranked_rows
        block, tree = self.arena["block"], TreeBuffers.of(self.growth.tree)
        decision = of_certain(self.arena, block, tree, vocab=vocab, draft_vocab=draft_vocab)
        self._ranked = np.zeros((1, ranked, BRANCH_WIDTH), np.int64)
        self._probs = np.zeros((1, ranked, BRANCH_WIDTH), np.float32)
        inputs.fill(self.arena, self.growth, vocab)
        grown = [call for i in range(len(self.growth.levels)) for call in self._grow(i)]
        drafts = self._pick(self.growth.picks, block[:, 1:])
        calls = [self._read(), *grown, drafts, *decision.calls(engines), *self._move()]
        self._program = capturing.make(calls, shape.context, self.arena.up, self.arena.down)

    def run(self) -> float:
        return self._program.run()

    def _read(self) -> Bound:
        """The last committed tokens: what may follow them."""
        rows = self.arena["read"]
        told = chain_inputs(rows.shape[1])
        return self._branch(rows, self.arena["draft_lengths"][:1], 1, told, slice(0, 1))

    def _grow(self, index: int) -> list[Bound]:
        """What may follow the rows of a level, each behind its ancestors alone."""
        level: Level = self.growth.levels[index]
        rows = np.zeros((1, len(level.rows)), np.int64)
        told = {"depths": level.depths, "visible": level.visible}
        lengths = self.arena["draft_lengths"][index + 1 : index + 2]
        grow = self._branch(rows, lengths, len(level.rows), told, level.ranked)
        return [self._pick(level.picks, rows), grow]

    def _branch(
        self, rows: Array, lengths: Array, ranked: int, told: Mapping[str, Array], to: slice
    ) -> Bound:
        inputs: dict[str, Array] = {
            "input_ids": rows,
            "past_lengths": lengths,
            "num_logits": np.array(ranked, np.int64),
            **told,
            **self._engines.draft_caches,
        }
        outputs: dict[str, Array] = {
            "top_tokens": self._ranked[:, to],
            "top_probs": self._probs[:, to],
            **present(self._engines.draft_caches),
        }
        return self._engines.branch.bind(inputs, outputs)

    def _pick(self, picks: Array, to: Array) -> Bound:
        inputs = {"ranked": self._ranked, "picks": picks}
        return self._engines.pick.bind(inputs, {"picked_tokens": to})

    def _move(self) -> list[Bound]:
        """The rows of the accepted path to behind the root's, in all layers."""
        return [call for caches in self._engines.joined for call in self._move_in(caches)]

    def _move_in(self, caches: Array) -> list[Bound]:
        paths = self.growth.paths
        rows = np.zeros((1, caches.shape[1], paths.shape[1], caches.shape[3]), caches.dtype)
        there = {CACHES: caches, "past_lengths": self.arena["target_lengths"]}
        found = {**there, "last_row": self.arena["last_row"], "paths": paths}
        return [
            self._engines.path.bind(found, {PATH_ROWS: rows}),
            self._engines.place.bind({**there, PATH_ROWS: rows}, {PLACED: caches}),
        ]


def _arena(growth: Growth, allocate: Allocate) -> Arena:
    f32, i32, i64, size = np.float32, np.int32, np.int64, growth.tree.size
    return Arena(
        host=(
            Field(name="target_lengths", shape=(1,), dtype=i32),
            Field(name="draft_lengths", shape=(1 + len(growth.levels),), dtype=i32),
            Field(name="read", shape=(1, growth.reads), dtype=i64),
            Field(name="accept_uniforms", shape=(1, size), dtype=f32),
            Field(name="draw_uniforms", shape=(1, size + 1), dtype=f32),
            *PARAMETERS,
        ),
        shared=(Field(name="block", shape=(1, size + 1), dtype=i64),),
        round=DECIDED,
        allocate=allocate,
    )


class WholeTrees:
    """Rounds with static trees, each launched as one program."""

    def __init__(
        self,
        engines: WholeTreeEngines,
        *,
        vocab: int,
        draft_vocab: int,
        capturing: Capturing,
    ) -> None:
        self._vocab = vocab
        self._capturing = capturing
        self._inputs: TreeInputs | None = None  # of the round that is about to run

        def captured(shape: RoundShape) -> WholeTreeProgram:
            if self._inputs is None:
                raise EngineError("a program was asked for without a round. Expected `run`.")
            return WholeTreeProgram(
                shape,
                engines,
                self._inputs,
                vocab=vocab,
                draft_vocab=draft_vocab,
                capturing=capturing,
            )

        self.programs = capturing.programs(captured)

    def serves(self, tree: Tree) -> bool:
        """Whether rounds with it are launched whole: there is a program, or room for one."""
        known = {shape.parents for shape in self.programs.captured}
        has_room = len(known) < MOST_TREES and self._capturing.has_room
        return tree.parents in known or has_room

    def run(self, inputs: TreeInputs, tree: Tree) -> Outcome:
        """One round with all drafts of a tree that stands level by level. Raises EngineError."""
        rows = len(inputs.tokens) + tree.size
        self._inputs = inputs
        found = self.programs.program(batch=1, drafts=tree.size, rows=rows, parents=tree.parents)
        inputs.fill(found.arena, found.growth, self._vocab)
        seconds = found.run()
        path = tree.path(int(found.arena["last_row"][0]))
        block = found.arena["block"][0]
        return Outcome(
            num_drafted=tree.depth,
            num_accepted=len(path),
            tokens=(*block[path].tolist(), int(found.arena["next_token"][0])),
            draft_s=0.0,
            verify_s=seconds,  # the round is one piece: its parts can't be told apart
            accept_s=0.0,
            num_nodes=tree.size,
            ranks=tuple(tree.ranks[row - 1] for row in path),
        )
