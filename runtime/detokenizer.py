"""Text from tokens as they come: whole characters only, at a cost that doesn't grow with the text.

Decoding one token on its own is wrong: a character may span tokens, and some tokenizers drop a
leading space. So a token's text is what it adds to the text of the few tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_CONTEXT_TOKENS = 4  # of the prompt, so that the first word keeps its leading space
_MAX_PENDING = 8  # a character has at most four bytes: more pending tokens are not one character
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one


class Decodes(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Incremental decoding; the pieces join to the text of all tokens pushed."""

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._told = tokenizer.decode(self._window) if self._window else ""
        self._pending = 0  # tokens at the window's end whose text is not told yet
        if self._told.endswith(REPLACEMENT):
            self._window, self._told = [], ""

    def push(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self._window.append(token)
        self._pending += 1
        text = self._tokenizer.decode(self._window)
        if text.endswith(REPLACEMENT) and self._pending < _MAX_PENDING:
            return ""
        return self._tell(text)

    def flush(self) -> str:
        """What is still pending, incomplete characters as U+FFFD: the text ends here."""
        if not self._pending:
            return ""
        return self._tell(self._tokenizer.decode(self._window))

    def _tell(self, text: str) -> str:
        piece = text[len(self._told) :]
        # The tokens just told become the context of the next ones.
        self._window = self._window[-self._pending :]
        self._told = self._tokenizer.decode(self._window)
        self._pending = 0
        return piece
