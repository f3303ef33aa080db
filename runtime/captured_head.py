"""A whole round of an EAGLE head as one program: join the target's states, k steps, verify, accept.

As `runtime.captured_round`, but for what the first step reads: always the pairs of the last k + 1
tokens, which is as many as a round of k drafts leaves unread at most. Fewer are new where drafts
were rejected: the others' rows are written again, from the same states. The states that the target
gave come with the round's copy and go with the next one's, so that a tree, a plain step or a longer
catching up in between finds them in the one store that all read (`runtime.features`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arena import Allocate, Arena, Field
from .captured_calls import DECIDED, Binds, Bound
from .captured_round import RoundEngines, RoundInputs, RoundProgram, host_fields
from .executor import Buffers
from .features import FeatureStore

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class StateEngines(RoundEngines):
    """Of what reads the target's states."""

    feature_width: int


@dataclass(frozen=True, kw_only=True)
class HeadEngines(StateEngines):
    """`draft` is the head. fuse: None where it starts from the target's states as they are."""

    fuse: Binds | None
    state_width: int


@dataclass(frozen=True, kw_only=True)
class StateInputs(RoundInputs):
    """features: of every row that the target has read; `keep` adds those of the round."""

    features: FeatureStore

    def fill(self, arena: Arena, k: int, vocab: int) -> None:
        super().fill(arena, k, vocab)
        read = arena["read_features"]
        # The last is the target's last state, before the last token.
        self.features.copy(len(self.tokens) - 1 - read.shape[1], read)

    def keep(self, arena: Arena) -> None:
        self.features.put(len(self.tokens) - 1, arena["features"])


class StateProgram(RoundProgram):
    """With the states of the last `leading` rows among what the host writes, and those that the
    target gives among what it reads."""

    _engines: StateEngines

    def _arena(self, k: int, allocate: Allocate) -> Arena:
        width, f32 = self._engines.feature_width, np.float32
        read = Field(name="read_features", shape=(1, self.lead, width), dtype=f32)
        block = Field(name="block", shape=(1, self.lead + k), dtype=np.int64)
        given = Field(name="features", shape=(1, k + 1, width), dtype=f32)
        return Arena(
            host=(*host_fields(k), read),
            shared=(block,),
            round=(*DECIDED, given),
            allocate=allocate,
        )

    def _features(self) -> Buffers:
        return {"features": self.arena["features"]}


class HeadProgram(StateProgram):
    """Of one number of drafts and one context bucket."""

    _engines: HeadEngines

    @staticmethod
    def leading(drafts: int) -> int:
        return drafts + 1

    def _before(self) -> list[Bound]:
        width = self._engines.state_width
        # A step reads one and writes the other.
        self._own = [np.zeros((1, 1, width), np.float32) for _ in range(2)]
        self._read: Array = self.arena["read_features"]
        if self._engines.fuse is None:
            return []
        features, self._read = self._read, np.zeros((1, self.lead, width), np.float32)
        return [self._engines.fuse.bind({"features": features}, {"states": self._read})]

    def _states(self, step: int) -> tuple[Buffers, Buffers]:
        read = self._read if step == 0 else self._own[(step - 1) % 2]
        return {"states": read}, {"next_state": self._own[step % 2]}
