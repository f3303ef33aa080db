"""Tiny byte-level tokenizers, saved as a bundle saves its own, and what a row of a mask allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.grammar import Grammar
from runtime.grammar_compiler import GrammarCompiler
from runtime.matcher import Matcher

MERGES = [("a", "b"), ("ab", "a"), ('"', ":"), ("}", "}"), ("1", "2"), ("Ġ", "a")]
ENDS = ("<end>", "<eot>")
PADDING = 7  # ids of the target beyond the tokenizer's


def byte_level(special: Sequence[str] = ENDS, without: str = "") -> Tokenizer:
    """Every byte but those of `without`, some merges, and special tokens behind them."""
    alphabet = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in without]
    merges = [(a, b) for a, b in MERGES if not set(a + b) & set(without)]
    tokens = [*alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


class Language:
    """A tokenizer in a file and the compiler over it."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        ends: Sequence[str] = ENDS,
        padding: int = PADDING,
    ) -> None:
        path = folder / "tokenizer.json"
        tokenizer.save(str(path))
        self.tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab_size() + padding
        self.eos = tuple(self.id(end) for end in ends)
        self.compiler = GrammarCompiler(path, self.vocab, self.eos)

    def matcher(self, grammar: Grammar, text: str = "") -> Matcher:
        """A matcher that has read a text."""
        matcher = self.compiler.compile(grammar)
        for token in self.ids(text):
            matcher.advance(token)
        return matcher

    def id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None
        return int(found)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def row(self, matcher: Matcher) -> np.ndarray:
        row = np.ones(self.vocab, np.bool_)
        matcher.allow(row)
        return row

    def allowed(self, matcher: Matcher) -> set[str | None]:
        """Tokens, as the vocabulary spells them; None for an id beyond the tokenizer's."""
        return {self.tokenizer.id_to_token(int(i)) for i in np.flatnonzero(self.row(matcher))}
