"""The committed text in the draft's own tokens, kept up as tokens are committed and taken back.

Encoding is not local: what a text's end becomes may change with the next character. So ids are kept
for a stable beginning only, up to a space, and the rest is encoded anew, together with some text in
front of it whose ids are known: where those come out as they were, the ids behind them are right.

Invariant: `ids` is a function of the tokens that were read; of those that were taken back nothing
is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .detokenizer import Detokenizer
from .tokenizer import Tokenizer

TAIL_CHARS = 256  # a longer unstable rest is cut
LIVE_CHARS = 64  # at its end stay unstable
CONTEXT_CHARS = 64  # encoded again in front of it
CUTS = 4  # places that are tried


@dataclass(frozen=True, kw_only=True)
class _Stable:
    """text[:end] is `ids`; text[start:end] alone is `context`."""

    end: int = 0
    ids: tuple[int, ...] = ()
    start: int = 0
    context: tuple[int, ...] = ()


@dataclass(kw_only=True)
class _Read:
    """The target's tokens, their text, and how long it was behind each of them."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    text: str = ""


class DraftText:
    """Reads the target's tokens, gives the draft's."""

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target = target
        self._draft = draft
        self._shared = frozenset(target.special.values()) & frozenset(draft.special.values())
        self._read, self._stable = _Read(), _Stable()
        self._detokenizer = Detokenizer(target)
        self._ids: list[int] | None = None  # of the text as it stands, once it was asked for

    @property
    def length(self) -> int:
        """Tokens of the target that were read."""
        return len(self._read.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        read = self._read
        for token in tokens:
            read.text += self._piece(token)
            read.tokens.append(token)
            read.ends.append(len(read.text))
            self._ids = None

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Tokens before them that make no whole character yet are read again.
        """
        if length >= self.length:
            return
        kept, whole = self._read.tokens[:length], length
        while whole and self._end(whole) == self._end(whole - 1):
            whole -= 1
        self._forget_beyond(whole)
        self.extend(kept[whole:])

    def ids(self) -> list[int]:
        """Of all whole characters, behind what the draft's tokenizer puts before a text."""
        ids, prefix = self._ids, self._draft.prefix
        if ids is None:
            ids = self._ids = self._encoded()
        return list(ids) if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def _piece(self, token: int) -> str:
        """A special token counts where the draft knows it, too."""
        written = self._target.special.get(token)
        if written is None:
            return self._detokenizer.push(token)
        self._detokenizer = Detokenizer(self._target)
        return written if written in self._shared else ""

    def _end(self, count: int) -> int:
        return self._read.ends[count - 1] if count else 0

    def _forget_beyond(self, length: int) -> None:
        read = self._read
        if length == 0 or self._end(length) < self._stable.end:
            self._stable = _Stable()
        read.text = read.text[: self._end(length)]
        del read.tokens[length:], read.ends[length:]
        special = [i for i, token in enumerate(read.tokens) if token in self._target.special]
        since = read.tokens[special[-1] + 1 :] if special else read.tokens
        self._detokenizer = Detokenizer(self._target, since)
        self._ids = None

    def _encoded(self) -> list[int]:
        text = self._read.text
        full = self._draft.encode(text[self._stable.start :])
        if tuple(full[: len(self._stable.context)]) != self._stable.context:
            self._stable = _Stable()
            full = self._draft.encode(text)
        ids = [*self._stable.ids, *full[len(self._stable.context) :]]
        if len(text) - self._stable.end > TAIL_CHARS:
            self._advance(full)
        return ids

    def _advance(self, full: list[int]) -> None:
        """Cut at a space where what stands before it comes out the same without what follows."""
        text, stable = self._read.text, self._stable
        cut = len(text) - LIVE_CHARS
        for _ in range(CUTS):
            cut = text.rfind(" ", stable.end + 1, cut)
            if cut < 0:
                return
            head = self._draft.encode(text[stable.start : cut])
            if full[: len(head)] == head:
                ids = (*stable.ids, *head[len(stable.context) :])
                start = max(0, text.rfind(" ", 0, max(0, cut - CONTEXT_CHARS)))
                context = tuple(self._draft.encode(text[start:cut]))
                self._stable = _Stable(end=cut, ids=ids, start=start, context=context)
                return
