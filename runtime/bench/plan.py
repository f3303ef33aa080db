"""Which runs make up a measurement, and in which order.

All bundles and draft lengths are measured in one interleaved run: a machine that slows down slows
all of them. Each slot takes every contestant once, each on another prompt, so that no contestant
reads a prompt twice in a row and finds it in its cache: the time to the first token is a cold one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ..errors import InvalidRequest
from ..tree_shape import DYNAMIC, DynamicTree, StaticTree, parse_tree
from .prompts import Prompt

PLAIN = 0
AUTO = "auto"
DraftLength = int | str | StaticTree | DynamicTree  # k, AUTO, or a tree


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One bundle at one draft length, or with one tree; k = 0 is plain decoding."""

    bundle: str
    draft_length: DraftLength

    @property
    def label(self) -> str:
        if self.draft_length == PLAIN:
            return "plain"
        return (
            f"k={self.draft_length}"
            if isinstance(self.draft_length, int)
            else str(self.draft_length)
        )

    @property
    def num_draft_tokens(self) -> int | None:
        """As `Decoder.generate` takes it: None lets the runtime choose."""
        return self.draft_length if isinstance(self.draft_length, int) else None

    @property
    def tree(self) -> StaticTree | DynamicTree | None:
        """The same for trees."""
        isnt_tree = isinstance(self.draft_length, int | str)
        return None if isnt_tree else self.draft_length  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Run:
    contestant: Contestant
    prompt: Prompt
    repeat: int


def parse_draft_lengths(text: str) -> tuple[DraftLength, ...]:
    """`1,2,auto,4x2x1` → (1, 2, "auto", a tree), without repeats; raises InvalidRequest."""
    found: list[DraftLength] = []
    for part in (piece.strip() for piece in text.split(",")):
        value = _draft_length(part)
        if value not in found and value != PLAIN:
            found.append(value)
    return tuple(found)


def _draft_length(part: str) -> DraftLength:
    if part == AUTO:
        return part
    if part.isdecimal():
        return int(part)
    if not part.startswith(DYNAMIC) and "x" not in part:
        raise InvalidRequest(
            f"-k: received {part!r}. Expected numbers, {AUTO} and trees: 1,2,auto,4x2x1,"
            f"{DYNAMIC}:16."
        )
    return parse_tree(part)


def interleave(
    contestants: Sequence[Contestant], prompts: Sequence[Prompt], repeats: int
) -> Iterator[Run]:
    """Every contestant on every prompt, `repeats` times."""
    count, slots = len(contestants), len(prompts)
    for repeat, slot, turn in product(range(repeats), range(slots), range(count)):
        index = (turn - repeat * slots - slot) % count  # nobody always goes first
        prompt = prompts[(slot + index) % slots]
        yield Run(contestant=contestants[index], prompt=prompt, repeat=repeat)
