"""A draft step whose decoder and sampling tail are two graphs, where a backend can't have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .executor import Buffers


class Part(Protocol):
    """The executor protocol."""

    @property
    def axes(self) -> dict[str, int]: ...
    def has_input(self, name: str) -> bool: ...
    def bind(self, inputs: Buffers, outputs: Buffers) -> Any: ...


class InTurn(Protocol):
    """Makes one call of several, each of which reads what the one before it left on the device."""

    def __call__(self, calls: Sequence[Any]) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class SplitDraft:
    """The executor of `contract.draft_graph`. decoder: the draft's logits behind the last row.
    tail: what samples from them (`contract.tail_graph`).
    """

    decoder: Part
    tail: Part
    in_turn: InTurn

    @property
    def axes(self) -> dict[str, int]:
        return self.tail.axes

    def has_input(self, name: str) -> bool:
        return self.decoder.has_input(name) or self.tail.has_input(name)

    def bind(self, inputs: Buffers, outputs: Buffers) -> Any:
        """As `runtime.executor.Executor.bind`."""
        logits = np.zeros((1, 1, self.tail.axes["head_vocab"]), np.float32)
        between = {"logits": logits}
        return self.in_turn(
            (
                self.decoder.bind(inputs, {**outputs, **between}),
                self.tail.bind({**inputs, **between}, outputs),
            )
        )
