"""Follows one text through a grammar: what may come next, one token on, some tokens back.

Invariant: a matcher that rolled back is as one that never read what it forgot. Where the library
can't go back itself (it is left in error by a dead end, and keeps no history of lexemes with
`max_tokens` or `stop`), a fresh state reads the tokens that are left.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

_DEAD_END = "NoExtensionBias"  # what the library calls a state with no next token


class Matcher:
    """One sequence's place in its grammar. End tokens are ours: the library never reads one.

    A grammar ends when an end token is read, and needs none where nothing else could follow.
    """

    def __init__(
        self, start: LLMatcher, open_words: NDArray[np.int32], eos_token_ids: tuple[int, ...]
    ) -> None:
        """`start`: never advanced; `open_words`: a bit for each id that may be text."""
        self._start = start
        self._library = start.deep_copy()
        self._open_words = open_words
        self._words = np.zeros_like(open_words)
        self._address = self._words.ctypes.data
        self._eos_token_ids = list(eos_token_ids)
        self._tokens: list[int] = []
        self._ended = False  # the last token is an end token
        self._broken = False  # the library is in error
        self._looked = False  # the three below are of this state
        self._may_end = False
        self._may_go_on = False

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def complete(self) -> bool:
        """An end token was read, or nothing but one may follow."""
        self._look()
        return self._ended or (self._may_end and not self._may_go_on)

    @property
    def dead_end(self) -> bool:
        """No token may follow, and the grammar may not end here."""
        self._look()
        return not (self._ended or self._may_end or self._may_go_on)

    def allow(self, row: NDArray[np.bool_]) -> None:
        """Fill `row` [vocab] with what may come next: end tokens exactly where it may end."""
        self._look()
        bits = self._words.view(np.uint8)
        row.view(np.uint8)[:] = np.unpackbits(bits, count=row.size, bitorder="little")
        row[self._eos_token_ids] = self._may_end

    def advance(self, token: int) -> None:
        """Read a token that is allowed here; any other is a defect of the caller's."""
        if self._ended or self._broken or not self._read(token):
            raise RuntimeError(
                f"token {token} behind {len(self._tokens)} tokens: the grammar allows no such "
                "token here. Expected one that `allow` allows."
            )
        self._tokens.append(token)
        self._looked = False

    def rollback(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens."""
        if not 0 <= num_tokens <= len(self._tokens):
            raise RuntimeError(f"rollback of {num_tokens} tokens out of {len(self._tokens)}")
        if num_tokens == 0:
            return
        del self._tokens[len(self._tokens) - num_tokens :]
        read = num_tokens - self._ended
        self._ended, self._looked = False, False
        if self._broken or not self._library.rollback(read):
            self._replay()

    def _read(self, token: int) -> bool:
        if token in self._eos_token_ids:
            self._ended = self._library.is_accepting()
            return self._ended
        if self._library.try_consume_tokens([token]) == 1:
            return True
        self._notice_error()
        return self._broken  # too complex for the library behind a token that it allowed

    def _replay(self) -> None:
        self._library, self._broken = self._start.deep_copy(), False
        if not self._library.consume_tokens(self._tokens):
            self._notice_error()

    def _look(self) -> None:
        """Ask the library once a state."""
        if self._looked:
            return
        self._looked = True
        if not (self._ended or self._broken):
            self._library.unsafe_compute_mask_ptr(self._address, self._words.nbytes)
            self._notice_error()
        if self._ended or self._broken:
            self._words.fill(0)
            self._may_end = self._may_go_on = False
            return
        self._words &= self._open_words
        self._may_end = self._library.is_accepting()
        self._may_go_on = self._can_read_the_first()

    def _can_read_the_first(self) -> bool:
        """Whether any token may follow; a mask whose first one can't be read allows none.

        Where the grammar forces a byte that no token spells, the library masks for what would come
        behind it (llguidance 1.9.1).
        """
        at = int(self._words.astype(np.bool_).argmax())
        word = int(self._words[at])
        if word == 0:
            return False
        lowest = (word & -word).bit_length() - 1
        if self._library.validate_tokens([32 * at + lowest]) == 1:
            return True
        self._words.fill(0)
        return False

    def _notice_error(self) -> None:
        self._broken = self._library.is_error()
        if self._broken:
            reason = self._library.get_error().partition("\n")[0]
            level = logging.DEBUG if reason == _DEAD_END else logging.WARNING
            log.log(level, "grammar: no way on behind token %d: %s", len(self._tokens), reason)
