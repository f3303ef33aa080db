"""The acceptance step, prebound for every draft length; the decision itself is in the graph.

Leviathan et al. 2023, algorithm 1: accept x_i while u_i q(x_i) < p(x_i); at the first rejection
draw from norm(max(p - q, 0)), after k accepts from p_{k+1}.
"""

from __future__ import annotations

from .buffers import Array, RoundBuffers
from .executor import Call, Executor
from .tree_buffers import TreeBuffers


class AcceptStep:
    """Reads the round buffers, decides, and writes num_accepted, next_token and new_lengths."""

    def __init__(self, executor: Executor, buffers: RoundBuffers) -> None:
        self._executor = executor
        self._buffers = buffers
        self._calls = [self._bind(k, tree) for k, tree in enumerate(buffers.chains)]
        self._trees: dict[int, Call] = {}

    def decide(self, k: int) -> float:
        """Accept a prefix of the k drafts and draw one more token; k = 0 only draws."""
        return self._calls[k].run()

    def decide_tree(self, k: int) -> float:
        """The same over the tree that the buffers hold; `last_row` says where the path ends."""
        if k not in self._trees:
            self._trees[k] = self._bind(k, self._buffers.tree(k))
        return self._trees[k].run()

    def _bind(self, k: int, tree: TreeBuffers) -> Call:
        b = self._buffers
        inputs: dict[str, Array] = {
            "logits": b.logits[:, : k + 1],
            "draft_tokens": b.drafts(k),
            # Certain drafts need no q; a graph needs one row to look at.
            "draft_probs": b.draft_probs[:, : min(k, b.draft_probs.shape[1])],
            "parents": tree.parents,
            "q_rows": b.q_rows[:, :k],
            "visible": tree.visible,
            "accept_uniforms": b.accept_uniforms[:, :k],
            "draw_uniforms": b.draw_uniforms[:, : k + 1],
            "past_lengths": b.target_lengths,
            "allowed_tokens": b.sampling.allowed[:, : k + 1],
            **b.sampling.shared,
        }
        outputs: dict[str, Array] = {
            "num_accepted": b.num_accepted,
            "next_token": b.next_token,
            "last_row": b.last_row,
            "new_lengths": b.new_lengths,
        }
        return self._executor.bind(inputs, outputs)
