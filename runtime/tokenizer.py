"""A tokenizer without a prompt's frills: text to the ids that spell it, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .errors import BundleError


class Tokenizer:
    """A `tokenizer.json`. Special tokens are matched in text, and left out of it."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        try:
            self._library = Library.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise BundleError(f"{path.name}: {error}; rebuild the bundle.") from error
        self._library.no_padding()
        self._library.no_truncation()
        added = self._library.get_added_tokens_decoder()
        #: id → how it is written in a text
        self.special = {i: token.content for i, token in added.items() if token.special}
        #: ids that stand before any text, such as a begin token
        self.prefix: list[int] = list(self._library.encode("").ids)

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone."""
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(list(ids), skip_special_tokens=True))
