"""Which rounds are captured, and which one serves a call: bookkeeping that no backend knows.

A program is everything that a round does, for one batch, one number of drafts and one context
bucket; where it grows a tree, for that tree. Programs are captured when they are first needed, the
largest bucket of their kind before any smaller one: it needs the most memory, and serves every call
that a smaller one could. So a smaller bucket is only ever an optimization, left out where memory is
short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from .errors import EngineError


@dataclass(frozen=True, kw_only=True)
class RoundShape:
    batch: int
    drafts: int  # k; a tree's nodes count
    context: int  # cache rows that attention reads: a bucket
    parents: tuple[int, ...] = ()  # of the tree that the program grows; (): it grows none

    def __str__(self) -> str:
        grown = f" grown behind rows {self.parents}" if self.parents else ""
        return f"batch {self.batch}, {self.drafts} drafts{grown}, context {self.context}"


class Program(Protocol):
    def run(self) -> float:
        """Everything once, from the inputs as they are now; returns the seconds it took."""


P = TypeVar("P", bound=Program)


class CapturedPrograms(Generic[P]):
    """Programs by shape, within what memory is left."""

    def __init__(
        self,
        capture: Callable[[RoundShape], P],
        contexts: Sequence[int],
        *,
        free_bytes: Callable[[], int],
        reserve_bytes: int,
    ) -> None:
        """contexts: buckets, ascending. reserve_bytes: what captures leave free."""
        if not contexts or list(contexts) != sorted(set(contexts)):
            raise ValueError(f"contexts: received {contexts}. Expected ascending buckets.")
        self._capture = capture
        self._contexts = tuple(contexts)
        self._free_bytes = free_bytes
        self._reserve_bytes = reserve_bytes
        self._programs: dict[RoundShape, P] = {}
        self._costs: dict[RoundShape, int] = {}  # bytes, of the largest of each kind

    @property
    def captured(self) -> tuple[RoundShape, ...]:
        """In the order in which they were captured."""
        return tuple(self._programs)

    def program(self, *, batch: int, drafts: int, rows: int, parents: tuple[int, ...] = ()) -> P:
        """The program for a call whose last cache row is `rows` - 1. Raises EngineError."""
        bucket = self._bucket(rows)
        shape = RoundShape(batch=batch, drafts=drafts, context=bucket, parents=parents)
        largest = self._largest(shape)
        if largest not in self._programs:
            self._costs[largest] = self._captured(largest)
        if shape not in self._programs and self._fits(shape):
            self._captured(shape)
        return self._programs[self._serving(shape)]

    def _bucket(self, rows: int) -> int:
        for context in self._contexts:
            if rows <= context:
                return context
        raise EngineError(
            f"captured round: received {rows} cache rows. Expected at most {self._contexts[-1]}, "
            "the context that the bundle was built for."
        )

    def _largest(self, shape: RoundShape) -> RoundShape:
        return replace(shape, context=self._contexts[-1])

    def _captured(self, shape: RoundShape) -> int:
        """Capture; returns the bytes that it took."""
        before = self._free_bytes()
        self._programs[shape] = self._capture(shape)
        return max(0, before - self._free_bytes())

    def _fits(self, shape: RoundShape) -> bool:
        """A smaller bucket takes at most what the largest of its kind took."""
        cost = self._costs[self._largest(shape)]
        return self._free_bytes() - cost >= self._reserve_bytes

    def _serving(self, shape: RoundShape) -> RoundShape:
        """The least captured bucket that holds the call; the largest is always there."""
        for context in self._contexts:
            found = replace(shape, context=context)
            if context >= shape.context and found in self._programs:
                return found
        raise AssertionError(f"{shape}: the largest bucket was captured before")
