"""How a device captures programs, whatever they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .arena import Allocate, on_host
from .captured_calls import MakeProgram, sequentially
from .captured_programs import CapturedPrograms, P, RoundShape


@dataclass(frozen=True, kw_only=True)
class Capturing:
    """`contexts`: buckets, ascending. `reserve_bytes`: what captures leave of `free_bytes`.
    `allocate`: the memory of a program's arena. `make`: a program of its calls.
    """

    contexts: Sequence[int]
    free_bytes: Callable[[], int]
    reserve_bytes: int = 0
    allocate: Allocate
    make: MakeProgram

    @classmethod
    def by_calls(cls, contexts: Sequence[int], make: MakeProgram = sequentially) -> Capturing:
        """Without a device: a program is its calls on the host's memory, one by one."""
        return cls(contexts=contexts, free_bytes=lambda: 1 << 40, allocate=on_host, make=make)

    @property
    def has_room(self) -> bool:
        return self.free_bytes() > self.reserve_bytes

    def programs(self, capture: Callable[[RoundShape], P]) -> CapturedPrograms[P]:
        return CapturedPrograms(
            capture,
            self.contexts,
            free_bytes=self.free_bytes,
            reserve_bytes=self.reserve_bytes,
        )
