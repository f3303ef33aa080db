"""Where a sequence ends: end tokens, limits and stop strings, checked token by token.

Invariant: text that could be the beginning of a stop string is held back, so nothing of a stop
string, nor anything behind it, is ever emitted, however the rounds cut the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .detokenizer import Detokenizer
from .sampling import SamplingParams
from .sequence import FinishReason, Sequence


class StopStrings:
    """Finds the first stop string in a stream of text pieces."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # the end of the text that could become a stop string

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may be emitted now, and whether a stop string ended it."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What ends one sequence."""

    eos_token_ids: frozenset[int]
    ignore_eos: bool
    max_tokens: int | None
    max_context: int
    stop: tuple[str, ...]

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Iterable[int], max_context: int) -> Ends:
        return cls(
            eos_token_ids=frozenset(eos_token_ids),
            ignore_eos=params.ignore_eos,
            max_tokens=params.max_tokens,
            max_context=max_context,
            stop=params.stop,
        )


class Committer:
    """Commits a round's tokens until one ends the sequence; what is behind it is dropped."""

    def __init__(self, sequence: Sequence, ends: Ends, detokenizer: Detokenizer) -> None:
        self._sequence = sequence
        self._ends = ends
        self._detokenizer = detokenizer
        self._strings = StopStrings(ends.stop)

    def commit(self, tokens: Iterable[int]) -> tuple[tuple[int, ...], str]:
        """The tokens committed, and the text that may be emitted with them."""
        committed: list[int] = []
        text = ""
        for token in tokens:
            self._sequence.commit(token)
            committed.append(token)
            reason, piece = self._check(token)
            text += piece
            if reason:
                self._sequence.finish_reason = reason
                break
        return tuple(committed), text

    def _check(self, token: int) -> tuple[FinishReason | None, str]:
        if token in self._ends.eos_token_ids and not self._ends.ignore_eos:
            return FinishReason.EOS, self.rest()
        text, stopped = self._strings.push(self._detokenizer.push(token))
        if stopped:
            return FinishReason.STOP, text
        reason = self._limit()
        return reason, text + self.rest() if reason else text

    def _limit(self) -> FinishReason | None:
        if self._sequence.num_generated == self._ends.max_tokens:
            return FinishReason.LENGTH
        if len(self._sequence.tokens) >= self._ends.max_context:
            return FinishReason.CONTEXT
        return None

    def rest(self) -> str:
        """What was held back: at the end nothing can complete a stop string or a character."""
        text, stopped = self._strings.push(self._detokenizer.flush())
        return text if stopped else text + self._strings.flush()
