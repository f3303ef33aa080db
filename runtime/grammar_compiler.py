"""Grammars to matchers over one bundle's tokenizer, by llguidance, which the extra brings.

The library is imported, and reads the tokenizer, when the first grammar comes. It knows a single
end token that text can't spell; which ids end a sequence is ours to say, so that several of them,
or none, or one that is plain text to the tokenizer, all work alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRequest
from .grammar import Grammar, GrammarKind
from .matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_END = "<|outrider end of text|>"
_MAX_REASON = 400  # characters of the library's message; it may quote the whole grammar

_MEND = {
    GrammarKind.JSON_SCHEMA: (
        "Expected a schema within what llguidance supports; take that part out, or let it be "
        'ignored with "x-guidance": {"lenient": true}'
    ),
    GrammarKind.REGEX: "Expected a regular expression in Rust's syntax, without look-around",
    GrammarKind.LARK: "Expected llguidance's Lark, with a rule named start",
}


class GrammarCompiler:
    """Makes matchers for one vocabulary.

    vocab_size: the target's, which may have ids beyond the tokenizer's; those are never allowed.
    """

    def __init__(
        self, tokenizer_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._open_words = np.zeros(0, np.int32)

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher before the first token.

        Raises InvalidRequest naming `grammar`: where it doesn't compile, where no text obeys it,
        where the tokenizer is of a kind that the library can't follow, and without the library.
        """
        tokenizer = self._tokenizer or self._load()
        start = _start(tokenizer, grammar)
        matcher = Matcher(start, self._open_words, self._eos_token_ids)
        if matcher.complete or matcher.dead_end:
            raise InvalidRequest(
                f"grammar: received a {grammar.kind} that allows no text in this model's tokens. "
                "Expected one that allows at least one token."
            )
        return matcher

    def _load(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise InvalidRequest(
                "grammar: received one, but llguidance is not installed. Expected the extra: "
                'pip install "outrider[grammar]".'
            ) from None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._path))
        end = _add_end(tokenizer)
        size = max(self._vocab_size, end + 1)
        try:
            library = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=end)
        except ValueError as error:
            raise _unsupported_tokenizer(str(error)) from None
        self._open_words = self._text_words(size, end)
        self._tokenizer = library  # last: another thread may be waiting for it
        return library

    def _text_words(self, size: int, end: int) -> NDArray[np.int32]:
        """A bit for each id that may be text, in the library's words of 32."""
        text = np.zeros(-(-size // 32) * 32, np.bool_)
        text[: self._vocab_size] = True
        text[[*self._eos_token_ids, end]] = False
        return np.packbits(text, bitorder="little").view(np.int32)


def _add_end(tokenizer: Tokenizer) -> int:
    """Add a token that ends the text for the library alone; returns its id."""
    known = frozenset(tokenizer.get_vocab().values())
    tokenizer.add_special_tokens([_END])
    end = tokenizer.token_to_id(_END)
    if end is None or end in known:
        raise _unsupported_tokenizer(f"its ids have gaps, and a token more would be {end}")
    return int(end)


def _start(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    from llguidance import LLMatcher

    lower: dict[GrammarKind, Callable[[str], str]] = {
        GrammarKind.JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
        GrammarKind.REGEX: LLMatcher.grammar_from_regex,
        GrammarKind.LARK: LLMatcher.grammar_from_lark,
    }
    start = LLMatcher(tokenizer, lower[grammar.kind](grammar.text), log_level=0)
    if start.is_error():
        reason = start.get_error().partition("<state>")[0].strip()[:_MAX_REASON]
        raise InvalidRequest(
            f"grammar: received a {grammar.kind} that does not compile: {reason}\n"
            f"{_MEND[grammar.kind]}."
        )
    return start


def _unsupported_tokenizer(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"grammar: this bundle's tokenizer can't be constrained: {reason}. Expected byte-level or "
        "byte-fallback BPE; generate without a grammar."
    )
