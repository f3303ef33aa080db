"""One request in progress: plans rounds, commits their tokens, and tells what to emit.

Invariant: when a step returns, and after `close`, both caches are as a clean run over the
committed tokens would have left them, wherever the round was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from .constraint import Constraint
from .detokenizer import Detokenizer
from .errors import InvalidRequest
from .offer import NO_OFFER, Offer
from .outcome import Outcome
from .planner import Choice, Planner
from .request import Request
from .round import Rounds
from .sequence import FinishReason, Sequence
from .stats import Stats
from .stops import Committer, Ends
from .text import Text
from .uniforms import uniform_table

OnRound = Callable[[Outcome], None]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one round added. Text may lag behind the tokens, never run ahead of them."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None  # on the last chunk


class Generation:
    """Steps from a checked request to its last token."""

    def __init__(
        self,
        request: Request,
        rounds: Rounds,
        planner: Planner,
        ends: Ends,
        text: Text,
        on_round: OnRound | None = None,
    ) -> None:
        self._rounds = rounds
        self._planner = planner
        self._ends = ends
        self._on_round = on_round
        self.sequence = Sequence(request.prompt)
        self._committer = Committer(self.sequence, ends, Detokenizer(text, request.prompt))
        width = request.tree.width if request.tree else 1
        self._uniforms = uniform_table(request.seed, ends.max_context + 1, width)
        self.stats = Stats(
            seed=request.seed,
            max_draft_tokens=rounds.buffers.max_draft_tokens,
            max_context=ends.max_context,
            num_prompt_tokens=self.sequence.prompt_length,
        )
        rounds.begin(
            request.params,
            request.prompt,
            eos_token_ids=tuple(ends.eos_token_ids),
            matcher=request.matcher,
        )
        _refuse_nothing(rounds.constraint)

    @property
    def finished(self) -> bool:
        return self.sequence.finish_reason is not None

    def step(self) -> Chunk:
        """The prompt and its first token, then a round a call."""
        start = perf_counter()
        first = self.sequence.num_generated == 0
        outcome = self._prefill() if first else self._round()
        token_ids, text = self._committer.commit(outcome.tokens)
        self._rounds.buffers.sampling.commit(token_ids)
        self._settle()
        text += self._constrain()
        seconds = perf_counter() - start
        if first:
            self.stats.prefilled(len(token_ids), seconds)
        else:
            self.stats.decoded(outcome, len(token_ids), seconds)
            if self._on_round:
                self._on_round(outcome)
        return Chunk(text=text, token_ids=token_ids, finish_reason=self.sequence.finish_reason)

    def close(self) -> None:
        """End here: cancelled, unless it has ended already."""
        if not self.finished:
            self.sequence.finish_reason = FinishReason.CANCELLED
        self._settle()

    def _prefill(self) -> Outcome:
        return self._rounds.prefill(self.sequence.tokens, self._uniforms)

    def _round(self) -> Outcome:
        offer = self._offer()
        choice = self._planner.choose(offer, self._remaining())
        outcome = self._run(choice)
        self._planner.observe(choice, outcome)
        return outcome

    def _run(self, choice: Choice) -> Outcome:
        tokens = self.sequence.tokens
        if choice.tree is None:
            return self._rounds.run(tokens, choice.k, self._uniforms, choice.offer.propose)
        nodes = min(choice.tree.nodes, self._ends.max_context - len(tokens) - 1)
        return self._rounds.run_tree(tokens, choice.tree, nodes, self._uniforms)

    def _constrain(self) -> str:
        """End where no token may follow; a complete grammar is a better reason than a limit."""
        limits = (None, FinishReason.LENGTH, FinishReason.CONTEXT)
        if not self._rounds.constraint.active or self.sequence.finish_reason not in limits:
            return ""
        reason = self._rounds.constraint.finish_reason
        if reason is None or (self.finished and reason is not FinishReason.GRAMMAR):
            return ""
        text = "" if self.finished else self._committer.rest()
        self.sequence.finish_reason = self.stats.finish_reason = reason
        return text

    def _offer(self) -> Offer:
        """A round commits up to k + 1 tokens, none of them beyond the context."""
        drafter, tokens = self._rounds.drafter, self.sequence.tokens
        room = min(self._planner.longest, self._ends.max_context - len(tokens) - 1)
        return drafter.offer(tokens, room) if drafter and room > 0 else NO_OFFER

    def _remaining(self) -> int | None:
        most = self._ends.max_tokens
        return None if most is None else most - self.sequence.num_generated

    def _settle(self) -> None:
        """Reconcile the caches to the committed tokens."""
        self._rounds.rollback(len(self.sequence.tokens))
        self.stats.target_rows = self._rounds.target.length
        self.stats.draft_rows = self._rounds.drafter.length if self._rounds.drafter else 0
        self.stats.finish_reason = self.sequence.finish_reason


def _refuse_nothing(constraint: Constraint) -> None:
    """A request that allows no first token has no answer."""
    if constraint.open_row(0):
        return
    raise InvalidRequest(
        "grammar, banned_tokens, min_tokens: together they allow no first token. Expected at least "
        "one; ban fewer tokens, or give a grammar that some text matches."
    )
