"""Text that is to follow, in the target's tokens: those that its tokenizer would go on with.

The committed ids are what they are, also where the tokenizer would have cut their text otherwise.
A continuation counts only if the last of them come out unchanged when their text and what follows
are encoded together; a merge across the place where they end makes it none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .detokenizer import REPLACEMENT
from .tokenizer import Tokenizer

WINDOW = 8  # tokens at most that are encoded again
CHARACTER_TOKENS = 3  # of a character that isn't whole yet: it has four bytes


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last committed tokens, and their text but for a character that isn't whole yet."""

    ids: list[int]
    text: str


class Retokenizer:
    """Of the target."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        #: how its special tokens are written
        self.special = frozenset(tokenizer.special.values())

    def tail(self, tokens: Sequence[int]) -> Tail | None:
        """The longest one, up to WINDOW tokens, that its own text stands for; None: none does.

        Behind a special token a text begins anew. Lone bytes are only taken for the beginning of a
        character where the text begins with them.
        """
        last = list(tokens[-WINDOW:])
        special = [i for i, token in enumerate(last) if token in self._tokenizer.special]
        last = last[special[-1] + 1 :] if special else last
        if not last:
            return Tail(ids=[], text="")
        tails = (self._read(last[start:]) for start in range(len(last)))
        found = next((tail for tail in tails if tail is not None), None)
        begins = found is not None and len(found.ids) == len(last)
        return found if found is not None and (found.text or begins) else None

    def following(self, tail: Tail, text: str) -> list[int] | None:
        """The tokens of `text` behind the tail; None where they would change it."""
        ids, count = self._tokenizer.encode(tail.text + text), len(tail.ids)
        return ids[count:] if ids[:count] == tail.ids else None

    def _read(self, ids: list[int]) -> Tail | None:
        whole = self._tokenizer.decode(ids)
        text = whole.removesuffix(REPLACEMENT)
        again = self._tokenizer.encode(text)
        missing = len(ids) - len(again)
        most = CHARACTER_TOKENS if text != whole else 0
        fits = 0 <= missing <= most and ids[: len(again)] == again
        return Tail(ids=ids, text=text) if fits else None
