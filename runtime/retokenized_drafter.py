"""A draft model of another tokenizer: its text, in the target's tokens.

The model goes on, greedily, from the committed text in its own tokens; what it says is encoded by
the target's tokenizer and proposed as certain. q is one-hot whatever the request's sampling is, so
the rule that accepts is exact, however well or badly the two tokenizers get on; they only decide
how much is accepted.

Invariant: the model's cache holds rows of `_ids`, from their beginning or a restart on; before it
drafts, it goes back to where they part from the ids of the committed text.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from .acceptance import PRIOR_ACCEPTANCE, Acceptance, AcceptanceByPosition
from .buffers import RoundBuffers
from .certain import write_certain
from .constraint import Constraint
from .detokenizer import Detokenizer
from .draft_model import DraftModel
from .draft_text import DraftText
from .drafter import Proposal
from .offer import NO_OFFER, Offer
from .retokenizer import Retokenizer, Tail
from .tokenizer import Tokenizer

STEPS_A_TOKEN = 4  # a draft whose tokens are shorter doesn't pay


class RetokenizedDrafter:
    """`model` drafts over buffers of its own, `own`, which ask for nothing: greedy and free."""

    def __init__(
        self,
        model: DraftModel,
        own: RoundBuffers,
        target: Tokenizer,
        draft: Tokenizer,
        buffers: RoundBuffers,
    ) -> None:
        self._model = model
        self._own = own
        self._free = Constraint(own.sampling.allowed)
        self._draft = draft
        self._text = DraftText(target, draft)
        self._retokenizer = Retokenizer(target)
        self._most = buffers.max_draft_tokens
        self._buffers = buffers
        self._ids: list[int] = []  # the draft's tokens, its drafts included

    @property
    def length(self) -> int:
        return self._text.length

    def acceptance(self, measured: float | None) -> Acceptance:
        prior = PRIOR_ACCEPTANCE if measured is None else measured
        return AcceptanceByPosition(self._most, prior)

    def offer(self, tokens: Sequence[int], most: int) -> Offer:
        """Nothing where no text stands for the last tokens, or there is none yet."""
        ids = self._committed(tokens)
        if not ids or self._retokenizer.tail(tokens) is None:
            return NO_OFFER
        self._model.rollback(self._agreeing(ids))
        return Offer(num_tokens=most, unread=self._model.offer(ids, 1).unread)

    def propose(self, tokens: Sequence[int], k: int, constraint: Constraint) -> Proposal:
        start = perf_counter()
        count = write_certain(self._drafted(tokens, k), self._buffers, constraint)
        return Proposal(num_drafted=count, seconds=perf_counter() - start, drawn=False)

    def rollback(self, length: int) -> None:
        self._text.rollback(length)

    def _committed(self, tokens: Sequence[int]) -> list[int]:
        self._text.extend(tokens[self._text.length :])
        return self._text.ids()

    def _drafted(self, tokens: Sequence[int], k: int) -> list[int]:
        """Up to k whole tokens of the target."""
        ids, tail = self._committed(tokens), self._retokenizer.tail(tokens)
        if not ids or tail is None:
            return []
        self._model.rollback(self._agreeing(ids))
        self._ids = ids
        text, found, detokenizer = "", list[int](), Detokenizer(self._draft, ids)
        for _ in range(STEPS_A_TOKEN * (k + 1)):
            token = self._step()
            if token in self._draft.special:
                return self._ended(tail, text, token)[:k]
            text += detokenizer.push(token)
            following = self._retokenizer.following(tail, text)
            if following is None:
                return []
            found = following[:-1]  # more text could change the last
            if len(found) >= k:
                break
        return found[:k]

    def _ended(self, tail: Tail, text: str, token: int) -> list[int]:
        """The whole text, which goes no further, and the token if the target has it as well."""
        written = self._draft.special[token]
        text += written if written in self._retokenizer.special else ""
        return self._retokenizer.following(tail, text) or []

    def _step(self) -> int:
        """The draft's likeliest token behind `_ids`, which grow by it."""
        self._own.set_last(self._ids)
        self._model.propose(self._ids, 1, self._free)
        token = int(self._own.drafts(1)[0, 0])
        self._ids.append(token)
        return token

    def _agreeing(self, ids: list[int]) -> int:
        """How many of `ids` the cache's rows are for; the last must be read again to go on."""
        least, most = 0, min(len(ids) - 1, len(self._ids), self._model.length)
        while least < most:
            middle = (least + most + 1) // 2
            if ids[least:middle] == self._ids[least:middle]:
                least = middle
            else:
                most = middle - 1
        return least
