"""A whole round as one program: k draft steps, verification, acceptance; one copy each way.

Nothing of a call is in the program but its shapes: tokens, lengths, uniforms and the sampling
parameters are tensors of one arena, which the host fills before each launch. The first draft step
always reads the last `lead` tokens, two for a draft model: where the draft knows the first of them
already, it writes the same row again, and a round has one form whether all drafts were accepted
before or not.

For requests without adjustments and constraints, whose tables nothing reads then; others take the
steps one by one (`runtime.round`). Invariant: every host field is written before every launch.
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
    Decision,
    fill_parameters,
    present,
)
from .captured_programs import RoundShape
from .capturing import Capturing
from .errors import EngineError
from .executor import Buffers
from .outcome import Outcome
from .sampling import SamplingParams
from .tree import Tree
from .tree_buffers import TreeBuffers
from .uniforms import ACCEPT, DRAFT, DRAW

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RoundEngines:
    """The three executors, and the caches that they share with prefill, by input name."""

    target: Binds
    draft: Binds
    accept: Binds
    target_caches: Mapping[str, Array]
    draft_caches: Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class RoundInputs:
    """What one round is told: all that may differ from the one before.

    tokens: the committed ones, at least `lead`. draft_rows: rows of the draft's cache that stand
    for all of them but those that the first step reads (`DraftModel.catch_up`).
    """

    tokens: Sequence[int]
    draft_rows: int
    uniforms: Array  # [purpose, position] f32
    params: SamplingParams

    def fill(self, arena: Arena, k: int, vocab: int) -> None:
        """Write every host field, and the block's committed tokens."""
        committed, lead = len(self.tokens), arena["block"].shape[1] - k
        arena["target_lengths"][0] = committed - 1
        arena["draft_lengths"][:] = self.draft_rows + lead - 1 + np.arange(k)
        arena["draft_lengths"][:1] = self.draft_rows
        here = slice(committed, committed + k)
        arena["draft_uniforms"][:] = self.uniforms[DRAFT, here]
        arena["accept_uniforms"][0] = self.uniforms[ACCEPT, here]
        arena["draw_uniforms"][0] = self.uniforms[DRAW, committed : committed + k + 1]
        fill_parameters(arena, self.params, vocab)
        arena["block"][0, :lead] = self.tokens[-lead:]

    def keep(self, arena: Arena) -> None:
        """Of what a launch left, all that later rounds read beside the caches."""


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
        capturing: Capturing,
    ) -> None:
        self.shape = shape
        drafts = shape.drafts
        self.lead = self.leading(drafts)
        self._engines = engines
        self.arena = self._arena(drafts, capturing.allocate)
        self.decision = Decision(
            self.arena,
            self.arena["block"][:, self.lead - 1 :],
            TreeBuffers.of(Tree.chain(drafts)),
            q_rows=np.arange(drafts)[None],
            q=np.zeros((1, drafts, draft_vocab), np.float32),
            vocab=vocab,
            given=self._features(),
        )
        inputs.fill(self.arena, drafts, vocab)
        steps = map(self._draft, range(drafts))
        calls = [*self._before(), *steps, *self.decision.calls(engines)]
        self._program = capturing.make(calls, shape.context, self.arena.up, self.arena.down)

    def run(self) -> float:
        return self._program.run()

    @staticmethod
    def leading(drafts: int) -> int:
        """Committed tokens that the first step reads."""
        return 2

    def _draft(self, step: int) -> Bound:
        a, lead = self.arena, self.lead
        end = lead + step
        inputs = {
            "input_ids": a["block"][:, :lead] if step == 0 else a["block"][:, end - 1 : end],
            "past_lengths": a["draft_lengths"][step : step + 1],
            "draft_uniforms": a["draft_uniforms"][step : step + 1],
            "drafted_tokens": a["block"][:, lead:end],
            "allowed_tokens": self.decision.allowed(1),
            **self.decision.sampling(),
            **self._engines.draft_caches,
        }
        outputs = {
            "draft_token": a["block"][:, end : end + 1],
            "draft_step_probs": self.decision.q[:, step : step + 1],
            **present(self._engines.draft_caches),
        }
        more_inputs, more_outputs = self._states(step)
        return self._engines.draft.bind({**inputs, **more_inputs}, {**outputs, **more_outputs})

    def _states(self, step: int) -> tuple[Buffers, Buffers]:
        """What a head's step reads and gives besides a draft model's."""
        return {}, {}

    def _features(self) -> Buffers:
        """What the target gives for a head."""
        return {}

    def _before(self) -> list[Bound]:
        """Calls that the first step waits for."""
        return []

    def _arena(self, k: int, allocate: Allocate) -> Arena:
        block = Field(name="block", shape=(1, self.lead + k), dtype=np.int64)
        return Arena(host=host_fields(k), shared=(block,), round=DECIDED, allocate=allocate)


def host_fields(k: int) -> tuple[Field, ...]:
    f32, i32 = np.float32, np.int32
    return (
        Field(name="target_lengths", shape=(1,), dtype=i32),
        Field(name="draft_lengths", shape=(k,), dtype=i32),
        Field(name="draft_uniforms", shape=(k,), dtype=f32),
        Field(name="accept_uniforms", shape=(1, k), dtype=f32),
        Field(name="draw_uniforms", shape=(1, k + 1), dtype=f32),
        *PARAMETERS,
    )


class CapturedRounds:
    """Rounds of a chain, each launched as one program."""

    def __init__(
        self,
        engines: RoundEngines,
        *,
        vocab: int,
        draft_vocab: int,
        capturing: Capturing,
        program: type[RoundProgram] = RoundProgram,
    ) -> None:
        """program: another for heads (`runtime.captured_head`)."""
        self._vocab = vocab
        self._inputs: RoundInputs | None = None  # of the round that is about to run

        def captured(shape: RoundShape) -> RoundProgram:
            if self._inputs is None:
                raise EngineError("a program was asked for without a round. Expected `run`.")
            return program(
                shape,
                engines,
                self._inputs,
                vocab=vocab,
                draft_vocab=draft_vocab,
                capturing=capturing,
            )

        self.programs = capturing.programs(captured)

    def run(self, inputs: RoundInputs, k: int) -> Outcome:
        """One round of k drafts behind the committed tokens. Raises EngineError."""
        rows = len(inputs.tokens) + k
        self._inputs = inputs
        found = self.programs.program(batch=1, drafts=k, rows=rows)
        inputs.fill(found.arena, k, self._vocab)
        seconds = found.run()
        arena, lead = found.arena, found.lead
        inputs.keep(arena)
        accepted = int(arena["num_accepted"][0])
        drafts = arena["block"][0, lead : lead + accepted].tolist()
        return Outcome(
            num_drafted=k,
            num_accepted=accepted,
            tokens=(*drafts, int(arena["next_token"][0])),
            draft_s=0.0,
            verify_s=seconds,  # the round is one piece: its parts can't be told apart
            accept_s=0.0,
        )
