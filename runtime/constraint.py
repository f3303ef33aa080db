"""Which tokens each row of a round may hold: grammar, bans and minimum length as one mask.

Invariant: between rounds the matcher has read exactly the tokens that were generated, whatever was
drafted, rejected, cut or cancelled. Within a round it follows the drafts, and row i says what may
come behind i of them: the same row masks draft i + 1 and the target's distribution of its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .matcher import Matcher
from .sequence import FinishReason
from .tree import Tree


class Constraint:
    """The mask of one request at a time, over a buffer that is bound once.

        begin(…)                                                    # a request
        open_row(0), drafted(a), open_row(1), drafted(b), open_row(2)   # as long as they say True
        settle(num_accepted, next_token)                        # how many tokens the round gave
        rollback(num_generated)                       # where a stop, a limit or a cancel took fewer

    Plain decoding and the first token behind the prompt are rounds without drafts. The last row
    is always opened. Where nothing is asked, it does nothing and every row allows everything.
    """

    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        """`allowed` [1, k + 1, vocab]: all true until a request asks for less."""
        self._allowed = allowed
        self.active = False
        self.begin(eos_token_ids=())

    def begin(
        self,
        *,
        eos_token_ids: Sequence[int],
        matcher: Matcher | None = None,
        banned_tokens: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """Start a request; nothing of an earlier one is left."""
        if self.active:
            self._allowed.fill(True)
        self.active = bool(matcher or len(banned_tokens) or min_tokens)
        self._eos_token_ids = list(eos_token_ids)
        self._matcher = matcher
        self._banned_tokens = list(banned_tokens)
        self._min_tokens = min_tokens
        self._num_generated = 0
        self._num_drafted = 0
        self._row_is_open = False
        self._end: FinishReason | None = None  # of the open row
        self._ends: list[FinishReason | None] = []  # of the rows of a tree

    @property
    def finish_reason(self) -> FinishReason | None:
        """Between rounds: why no token may follow the generated ones, if none may.

        It opens the next round's first row, which costs a mask: ask it where nothing else ended
        the sequence.
        """
        self.open_row(0)
        return self._end

    def open_row(self, i: int) -> bool:
        """Fill row i, behind i drafts; returns whether a token may follow there.

        Where none may, the row allows everything: of an empty one there is no distribution to draw
        from, and `settle` drops what was drawn.
        """
        if not self.active:
            return True
        if i != self._num_drafted:
            raise RuntimeError(f"row {i} behind {self._num_drafted} drafts. Expected them in step.")
        if not self._row_is_open:
            self._row_is_open = True
            self._end = self._fill(self._allowed[0, i])
        return self._end is None

    def drafted(self, token: int) -> bool:
        """Follow a draft; returns False, and follows nothing, where the open row bans it."""
        if not self.active:
            return True
        if not self._row_is_open or self._end is not None:
            raise RuntimeError(f"draft {token} where no row is open. Expected open_row to be True.")
        if not self._allowed[0, self._num_drafted, token]:
            return False
        self._read(token)
        self._num_drafted += 1
        return True

    def open_tree(self, tree: Tree, tokens: Sequence[int]) -> set[int]:
        """Fill the row of every draft of a tree; returns the rows of those that may not stand.

        They, and all behind them, are to be left out of it, and `keep_rows` told. Between this and
        `settle_tree` the matcher is where it was.
        """
        self._ends = [None] * (tree.size + 1)
        banned: set[int] = set()
        if self.active:
            self._open_branch(0, tree.children(), tokens, banned)
            self._row_is_open = False
        return banned

    def keep_rows(self, rows: Sequence[int]) -> None:
        """The drafts of a tree that are left, by the rows that `open_tree` knew them by."""
        if not self.active:
            return
        for new, old in enumerate(rows, start=1):
            if new != old:
                self._allowed[0, new] = self._allowed[0, old]
        self._ends = [self._ends[0], *(self._ends[row] for row in rows)]

    def settle_tree(self, last_row: int, accepted: Sequence[int], next_token: int) -> int:
        """As `settle`, for the path of a tree that ends in `last_row`."""
        if not self.active:
            return len(accepted) + 1
        for token in accepted:
            self._read(token)
        self._num_generated += len(accepted)
        if self._ends[last_row] is not None:
            return len(accepted)
        self._read(next_token)
        self._num_generated += 1
        return len(accepted) + 1

    def _open_branch(
        self, row: int, children: list[list[int]], tokens: Sequence[int], banned: set[int]
    ) -> None:
        """Row by row, each behind its ancestors."""
        end = self._ends[row] = self._fill(self._allowed[0, row])
        for child in children[row]:
            token = tokens[child - 1]
            if end is not None or not self._allowed[0, row, token]:
                banned.add(child)
                continue
            self._read(token)
            self._num_drafted += 1
            self._open_branch(child, children, tokens, banned)
            self._num_drafted -= 1
            if self._matcher:
                self._matcher.rollback(1)

    def settle(self, num_accepted: int, next_token: int) -> int:
        """Keep the accepted drafts and the recovered or bonus token; returns how many tokens.

        A bonus token behind the end is not kept: the round then gave `num_accepted` tokens.
        """
        if not self.active:
            return num_accepted + 1
        behind_the_end = num_accepted == self._num_drafted and not self.open_row(num_accepted)
        self.rollback(self._num_generated + num_accepted)
        if behind_the_end:
            return num_accepted
        self._read(next_token)
        self._num_generated += 1
        return num_accepted + 1

    def rollback(self, num_generated: int) -> None:
        """Be as if `num_generated` tokens had been generated, and none drafted behind them."""
        if not self.active:
            return
        read = self._num_generated + self._num_drafted
        if not 0 <= num_generated <= read:
            raise RuntimeError(f"rollback to {num_generated} tokens out of {read}")
        if self._matcher and num_generated < read:
            self._matcher.rollback(read - num_generated)
        self._row_is_open = self._row_is_open and num_generated == read and not self._num_drafted
        self._num_generated, self._num_drafted = num_generated, 0

    def _read(self, token: int) -> None:
        if self._matcher:
            self._matcher.advance(token)
        self._row_is_open = False

    def _fill(self, row: NDArray[np.bool_]) -> FinishReason | None:
        """What may follow; where nothing may, the reason."""
        if self._matcher and self._matcher.complete:
            row.fill(True)
            return FinishReason.GRAMMAR
        if self._matcher:
            self._matcher.allow(row)
        else:
            row.fill(True)
        row[self._banned_tokens] = False
        if self._num_generated + self._num_drafted < self._min_tokens:
            row[self._eos_token_ids] = False
        if row.any():
            return None
        row.fill(True)
        return FinishReason.DEAD_END
