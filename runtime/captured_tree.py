"""Verification and acceptance over a tree as one program; which drafts it has, the host decides.

As in `runtime.captured_round` nothing of a call is in the program but its shapes, here the number
of drafts and the context: the tree itself, who descends from whom, is tensors of the arena, and so
a program serves every tree of its size. Rows of the accepted path are moved behind it. For trees
that the host grows: dynamic ones, a lookup's, a head's, and what `runtime.whole_tree` doesn't
serve. The states that the target gives for a head come with the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arena import Allocate, Arena, Field
from .buffers import RoundBuffers
from .captured_calls import DECIDED, PARAMETERS, Binds, of_certain
from .captured_programs import RoundShape
from .capturing import Capturing
from .features import FeatureStore
from .tree_buffers import TreeBuffers

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TreeEngines:
    """The two executors, and the caches that the target shares with prefill, by input name."""

    target: Binds
    accept: Binds
    target_caches: Mapping[str, Array]


class TreeProgram:
    """The arena, the calls and the program of one number of drafts, all of them certain."""

    def __init__(
        self,
        shape: RoundShape,
        engines: TreeEngines,
        buffers: RoundBuffers,
        *,
        feature_width: int,
        capturing: Capturing,
    ) -> None:
        """buffers: of the round that it is made for, since making it may run its calls."""
        size, vocab = shape.drafts, buffers.logits.shape[2]
        given = _features(size, feature_width)
        self.arena = _arena(size, given, capturing.allocate)
        self._size, a = size, self.arena
        tree = TreeBuffers(parents=a["parents"], visible=a["visible"], depths=a["depths"])
        draft_vocab = buffers.draft_probs.shape[2]
        self.decision = of_certain(
            a, a["block"], tree, vocab=vocab, draft_vocab=draft_vocab,
            given={one.name: a[one.name] for one in given},
        )  # fmt: skip
        self.fill(buffers)
        calls = self.decision.calls(engines)
        self._program = capturing.make(calls, shape.context, self.arena.up, self.arena.down)

    def fill(self, buffers: RoundBuffers) -> None:
        """Write every host field: the round's own, as the steps would read them."""
        a, size, tree = self.arena, self._size, buffers.tree(self._size)
        a["target_lengths"][:] = buffers.target_lengths
        a["block"][:] = buffers.query(size + 1)
        a["parents"][:], a["visible"][:], a["depths"][:] = tree.parents, tree.visible, tree.depths
        a["accept_uniforms"][:] = buffers.accept_uniforms[:, :size]
        a["draw_uniforms"][:] = buffers.draw_uniforms[:, : size + 1]
        for one in PARAMETERS:
            a[one.name][:] = buffers.sampling.shared[one.name]

    def run(self) -> float:
        return self._program.run()


def _features(size: int, width: int) -> tuple[Field, ...]:
    """What the target gives for a head; nothing where nobody reads its states."""
    field = Field(name="features", shape=(1, size + 1, width), dtype=np.float32)
    return (field,) if width else ()


def _arena(size: int, given: Sequence[Field], allocate: Allocate) -> Arena:
    f32, i32, i64 = np.float32, np.int32, np.int64
    return Arena(
        host=(
            Field(name="target_lengths", shape=(1,), dtype=i32),
            Field(name="block", shape=(1, size + 1), dtype=i64),
            Field(name="parents", shape=(1, size), dtype=i64),
            Field(name="visible", shape=(1, size + 1, size + 1), dtype=np.bool_),
            Field(name="depths", shape=(1, size + 1), dtype=i64),
            Field(name="accept_uniforms", shape=(1, size), dtype=f32),
            Field(name="draw_uniforms", shape=(1, size + 1), dtype=f32),
            *PARAMETERS,
        ),
        shared=(),
        round=(*DECIDED, *given),
        allocate=allocate,
    )


class CapturedTrees:
    """Decisions over trees, each launched as one program."""

    def __init__(
        self,
        engines: TreeEngines,
        buffers: RoundBuffers,
        features: FeatureStore | None,
        capturing: Capturing,
    ) -> None:
        """buffers, features: where each round lies, and where its outcome goes."""
        self._buffers, self._features = buffers, features
        width = 0 if features is None else features.width

        def captured(shape: RoundShape) -> TreeProgram:
            return TreeProgram(shape, engines, buffers, feature_width=width, capturing=capturing)

        self.programs = capturing.programs(captured)

    def decide(self, size: int) -> float:
        """Over the buffers' tree of `size` drafts; returns the seconds. Raises EngineError."""
        b = self._buffers
        rows = int(b.target_lengths[0]) + size + 1
        found = self.programs.program(batch=1, drafts=size, rows=rows)
        found.fill(b)
        seconds = found.run()
        for name, kept in (
            ("num_accepted", b.num_accepted),
            ("next_token", b.next_token),
            ("last_row", b.last_row),
            ("new_lengths", b.new_lengths),
        ):
            kept[:] = found.arena[name]
        if self._features is not None:
            self._features.output(size + 1)[:] = found.arena["features"]
        return seconds
