"""Rounds that are launched whole where they can be, and taken step by step elsewhere.

Invariant: whichever way a round went, lengths and caches are left as the steps would leave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from .captured_round import CapturedRounds
from .captured_tree import CapturedTrees
from .contract import BRANCH_WIDTH
from .draft_model import DraftModel
from .drafter import Propose
from .matcher import Matcher
from .model_brancher import ModelBrancher
from .outcome import Outcome
from .round import Rounds
from .sampling import SamplingParams
from .steps import Steps
from .tree import Tree
from .tree_shape import StaticTree, TreeShape, level_by_level
from .whole_chain import prepared, settle
from .whole_tree import TreeInputs, WholeTrees


class WholeRounds(Rounds):
    """Adjusted logits, grammars and bans need the host between the steps; such rounds take them.

    Static trees of a draft model are one launch. Of others the host decides what their drafts are:
    which rows of a dynamic tree are expanded follows from all that was ranked before, and a lookup
    is the host's. What follows, verification and acceptance, is then one launch, and the rows of
    the accepted path are moved behind it.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        captured: CapturedRounds | None,
        trees: CapturedTrees | None,
        whole_trees: WholeTrees | None = None,
        max_context: int,
    ) -> None:
        """captured: of a draft model or heads beside the target. whole_trees: of a draft model.
        None: they take the steps."""
        super().__init__(steps)
        self.captured = captured
        self.trees = trees
        self.whole_trees = whole_trees
        self._max_context = max_context
        self._params = SamplingParams()

    def begin(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        eos_token_ids: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self._params = params
        super().begin(params, prompt, eos_token_ids=eos_token_ids, matcher=matcher)

    def run(
        self, tokens: list[int], k: int, uniforms: NDArray[Any], propose: Propose | None = None
    ) -> Outcome:
        if self.captured is None or propose is not None or not self._is_whole(tokens, k):
            return super().run(tokens, k, uniforms, propose)
        inputs = prepared(self.drafter, tokens, k, uniforms, self._params)
        if inputs is None or self.drafter is None:
            return super().run(tokens, k, uniforms)
        outcome = self.captured.run(inputs, k)
        settle(self.drafter, len(tokens), k)
        self.target.length = len(tokens) + outcome.num_accepted
        self.drafter.rollback(self.target.length)
        return outcome

    def run_tree(
        self, tokens: list[int], shape: TreeShape, nodes: int, uniforms: NDArray[Any]
    ) -> Outcome:
        """Near the end of the context, where not all drafts fit, the host grows what does."""
        model, brancher, whole = self.drafter, self.brancher, self.whole_trees
        tree = _all_of(shape, nodes)
        if whole is None or tree is None or not self._is_free or not whole.serves(tree):
            return super().run_tree(tokens, shape, nodes, uniforms)
        if not isinstance(model, DraftModel) or not isinstance(brancher, ModelBrancher):
            return super().run_tree(tokens, shape, nodes, uniforms)
        reads, committed, window = tree.depth + 1, len(tokens), model.window
        if not brancher.catch_up(tokens, reads, tree.size):
            return super().run_tree(tokens, shape, nodes, uniforms)
        inputs = TreeInputs(
            tokens=tokens,
            draft_rows=committed - reads - window.base,
            uniforms=uniforms,
            params=self._params,
        )
        outcome = whole.run(inputs, tree)
        window.rows = committed - window.base
        self.target.length = committed + outcome.num_accepted
        model.rollback(self.target.length)
        return outcome

    def _decide_tree(self, size: int) -> tuple[float, float]:
        if self.trees is None or not size or not self._is_free:
            return super()._decide_tree(size)
        return self.trees.decide(size), 0.0  # one piece: its parts can't be told apart

    def _is_whole(self, tokens: list[int], k: int) -> bool:
        fits = len(tokens) >= 2 and len(tokens) + k <= self._max_context
        return k > 0 and fits and self._is_free

    @property
    def _is_free(self) -> bool:
        """Whether no table of the host's is read between the steps."""
        return not (self.buffers.sampling.shared["adjust"][0] or self.constraint.active)


def _all_of(shape: TreeShape, nodes: int) -> Tree | None:
    """The tree of a static shape, level by level, where a drafter that ranks BRANCH_WIDTH tokens
    fills all of it."""
    if not isinstance(shape, StaticTree) or not 0 < shape.nodes <= nodes:
        return None
    return level_by_level(shape.tree) if shape.width <= BRANCH_WIDTH else None
