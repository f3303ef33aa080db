"""One round: draft k tokens, verify k + 1 rows, accept a prefix, draw one more.

Invariant, between rounds: with C tokens committed the target cache holds C - 1 rows, the last
token being the next query; the drafter has read C - 1 tokens, one fewer after a full accept, and
any number fewer after rounds with k = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from .constraint import Constraint
from .drafter import Proposal, Propose
from .matcher import Matcher
from .outcome import Outcome
from .sampling import SamplingParams
from .steps import Steps
from .target import PREFILL_CHUNK
from .tree_shape import DraftTree, TreeShape

NOTHING = Proposal(num_drafted=0, seconds=0.0)


class Rounds:
    """The three steps over one set of buffers: all state of a sequence but its tokens."""

    def __init__(self, steps: Steps) -> None:
        self.buffers = steps.buffers
        self.target = steps.target
        self.drafter = steps.drafter
        self.accept = steps.accept
        self.brancher = steps.brancher
        self.constraint = Constraint(steps.buffers.sampling.allowed)
        self._prompt_length = 0
        self._prefilled: list[int] = []  # tokens of the rows that prefill wrote, for reuse

    def begin(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        eos_token_ids: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """Set how the next sequence is sampled; nothing of an earlier one is left."""
        self._prompt_length = len(prompt)
        self.buffers.sampling.begin(params, prompt)
        self.constraint.begin(
            eos_token_ids=eos_token_ids,
            matcher=matcher,
            banned_tokens=params.banned_tokens,
            min_tokens=params.min_tokens,
        )

    def run(
        self, tokens: list[int], k: int, uniforms: NDArray[Any], propose: Propose | None = None
    ) -> Outcome:
        """One round behind the committed `tokens`; the caches follow, `tokens` are the caller's.

        A drafter may come up with fewer than k tokens. propose: of the offer that was chosen.
        """
        self.buffers.set_last(tokens)
        self.buffers.set_uniforms(uniforms, len(tokens), k)
        proposal = NOTHING
        if self.drafter and k:
            proposal = (propose or self.drafter.propose)(tokens, k, self.constraint)
            mark = self.buffers.set_drawn if proposal.drawn else self.buffers.set_certain
            mark(proposal.num_drafted)
        self.constraint.open_row(proposal.num_drafted)
        verify_s = self.target.verify(proposal.num_drafted + 1)
        return self._accepted(proposal.num_drafted, proposal.seconds, verify_s)

    def run_tree(
        self, tokens: list[int], shape: TreeShape, nodes: int, uniforms: NDArray[Any]
    ) -> Outcome:
        """The same with a tree of up to `nodes` drafts; a plain round where nothing is drafted."""
        self.buffers.set_last(tokens)
        draft, draft_s = self._grown(tokens, shape, nodes)
        draft = self._allowed(draft)
        tree, b = draft.tree, self.buffers
        b.block[0, 2 : 2 + tree.size] = draft.tokens
        b.set_certain(tree.size)
        b.set_tree(tree, uniforms, len(tokens))
        verify_s, accept_s = self._decide_tree(tree.size)
        row, token = int(b.last_row[0]), int(b.next_token[0])
        path = tree.path(row)
        compact_s = self.target.keep_path(path)
        accepted = [draft.tokens[at - 1] for at in path]
        kept = self.constraint.settle_tree(row, accepted, token)
        b.target_lengths[0] = b.new_lengths[0]
        if self.drafter:
            self.drafter.rollback(int(b.new_lengths[0]))
        return Outcome(
            num_drafted=tree.depth,
            num_accepted=len(path),
            tokens=(*accepted, token)[:kept],
            draft_s=draft_s,
            verify_s=verify_s,
            accept_s=accept_s,
            num_nodes=tree.size,
            ranks=tuple(tree.ranks[at - 1] for at in path),
            compact_s=compact_s,
        )

    def _decide_tree(self, size: int) -> tuple[float, float]:
        """Verify and accept over the tree of `size` drafts in the buffers; returns the seconds."""
        return self.target.verify_tree(size + 1), self.accept.decide_tree(size)

    def _grown(self, tokens: list[int], shape: TreeShape, nodes: int) -> tuple[DraftTree, float]:
        """At most `nodes` drafts behind the committed tokens, and the seconds that they took."""
        brancher = self.brancher
        if brancher is None or nodes < 1:
            return DraftTree.empty(), 0.0
        first = brancher.start(tokens, shape.nodes)
        if first is None:
            return DraftTree.empty(), 0.0
        try:
            draft, seconds = shape.grown(brancher, first, nodes)
        finally:
            brancher.stop()
        return draft, first.seconds + seconds

    def _allowed(self, draft: DraftTree) -> DraftTree:
        """Without the drafts that grammar, bans or minimum length rule out."""
        banned = self.constraint.open_tree(draft.tree, draft.tokens)
        if not banned:
            return draft
        _, rows = draft.tree.without(banned)
        self.constraint.keep_rows(rows)
        return draft.only(rows)

    def prefill(self, tokens: list[int], uniforms: NDArray[Any]) -> Outcome:
        """Read a prompt in chunks and draw its first token from the last row."""
        seconds, start = 0.0, self._begin(tokens)
        while start < len(tokens):
            chunk = tokens[start : start + PREFILL_CHUNK]
            seconds += self.target.prefill(chunk)
            self._prefilled += chunk
            start += len(chunk)
        self.target.length -= 1  # accept counts the last query row itself
        self.buffers.set_uniforms(uniforms, len(tokens), 0)
        self.constraint.open_row(0)
        return self._accepted(0, 0.0, seconds)

    def rollback(self, committed: int) -> None:
        """Leave both caches as a run that committed this many tokens would have."""
        self.target.length = min(self.target.length, committed - 1)
        self.constraint.rollback(max(0, committed - self._prompt_length))
        if self.drafter:
            self.drafter.rollback(committed - 1)

    def forget(self) -> None:
        """Nothing that was read is taken for valid: of use after calls by hand."""
        self._prefilled.clear()
        self.target.length = 0
        if self.drafter:
            self.drafter.rollback(0)

    def _accepted(self, k: int, draft_s: float, verify_s: float) -> Outcome:
        accept_s = self.accept.decide(k)
        b = self.buffers
        accepted, token = int(b.num_accepted[0]), int(b.next_token[0])
        kept = self.constraint.settle(accepted, token)
        b.target_lengths[0] = b.new_lengths[0]
        if self.drafter:
            self.drafter.rollback(int(b.new_lengths[0]))
        return Outcome(
            num_drafted=k,
            num_accepted=accepted,
            tokens=(*b.block[0, 2 : 2 + accepted].tolist(), token)[:kept],
            draft_s=draft_s,
            verify_s=verify_s,
            accept_s=accept_s,
        )

    def _begin(self, tokens: list[int]) -> int:
        """Set lengths for a new prompt; returns how many of its rows are there already.

        Only whole chunks that an earlier prefill wrote are kept, the last prompt row never: so
        every row comes from the same call with the same shapes as in a clean run, bit for bit.
        """
        common = _common_prefix(self._prefilled, tokens[:-1])
        kept = common // PREFILL_CHUNK * PREFILL_CHUNK
        del self._prefilled[kept:]
        self.target.length = kept
        if self.drafter:
            self.drafter.rollback(0)
        return kept


def _common_prefix(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
