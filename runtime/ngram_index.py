"""Where the last tokens of a text stood before: an index of its n-grams that grows and shrinks.

An n-gram is entered when a token has come behind it, so that every place found has a continuation,
and the text's end does not find itself. A step costs the same however long the text is.

Invariant: after `rollback(n)` the index equals that of a fresh one which read the first n tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .acceptance import MOST_SUPPORT

NOWHERE = 0  # no n-gram ends before the first token


@dataclass(frozen=True, kw_only=True)
class Match:
    """The text's last `length` tokens also stand in front of token `end`."""

    end: int
    length: int
    disputed: bool  # another token followed the same n-gram the time before


class NgramIndex:
    """n-grams of `shortest` to `longest` tokens, each with the place where it ended last."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = tuple(range(shortest, longest + 1))
        self.tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        # At i: where the n-grams that end in front of token i ended before, one place a size.
        self._before: list[tuple[int, ...]] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            self._before.append(tuple(self._enter(end, size) for size in self._sizes))
            self.tokens.append(token)

    def rollback(self, length: int) -> None:
        """Forget everything beyond the first `length` tokens."""
        while len(self.tokens) > length:
            self.tokens.pop()
            end, places = len(self.tokens), self._before.pop()
            for size, place in zip(self._sizes, places, strict=True):
                self._leave(end, size, place)

    def find(self) -> Match | None:
        """The longest ending that stood somewhere before; of several places the latest."""
        end = len(self.tokens)
        for size in reversed(self._sizes):
            place = self._last.get(self._ngram(end, size)) if size <= end else None
            if place is not None:
                return self._match(place, size)
        return None

    def places(self, most: int) -> list[int]:
        """Where the longest ending that is known stood, the latest first: what follows it there."""
        end = len(self.tokens)
        for size in reversed(self._sizes):
            place = self._last.get(self._ngram(end, size), NOWHERE) if size <= end else NOWHERE
            found: list[int] = []
            while place != NOWHERE and len(found) < most:
                found.append(place)
                place = self._before[place][size - self._sizes[0]]
            if found:
                return found
        return []

    def _match(self, end: int, size: int) -> Match:
        earlier = self._before[end][size - self._sizes[0]]
        disputed = earlier != NOWHERE and self.tokens[earlier] != self.tokens[end]
        return Match(end=end, length=self._agreement(end, size), disputed=disputed)

    def _agreement(self, end: int, known: int) -> int:
        """How many tokens in front of `end` equal the text's last ones; `known` of them do."""
        tokens, distance = self.tokens, len(self.tokens) - end
        length, most = known, min(end, MOST_SUPPORT)
        while length < most and tokens[end - length - 1] == tokens[end + distance - length - 1]:
            length += 1
        return length

    def _enter(self, end: int, size: int) -> int:
        if size > end:
            return NOWHERE
        ngram = self._ngram(end, size)
        place = self._last.get(ngram, NOWHERE)
        self._last[ngram] = end
        return place

    def _leave(self, end: int, size: int, place: int) -> None:
        if size > end:
            return
        if place == NOWHERE:
            del self._last[self._ngram(end, size)]
        else:
            self._last[self._ngram(end, size)] = place

    def _ngram(self, end: int, size: int) -> tuple[int, ...]:
        return tuple(self.tokens[end - size : end])
