"""A draft model for trees: level by level, the rows of a level in one call."""

from __future__ import annotations

from collections.abc import Sequence

from .branch_calls import BranchCalls
from .contract import MOST_TREE_NODES
from .draft_model import DraftModel
from .executor import Executor
from .tree_shape import DraftTree, Ranked


class ModelBrancher:
    """The branch graph over the cache of the model that drafts chains."""

    def __init__(self, graph: Executor, model: DraftModel) -> None:
        self._model = model
        self._calls = BranchCalls(graph, model.window.lengths, model.caches, model.present)

    @property
    def most_levels(self) -> int:
        return MOST_TREE_NODES

    def start(self, tokens: Sequence[int], rows: int) -> Ranked | None:
        window = self._model.window
        window.make_room(len(tokens), rows + 1)
        unread = tokens[window.end :]
        if not unread:  # read before, its candidates forgotten: read the last one again
            window.rows -= 1
            unread = tokens[-1:]
        return self._calls.read(unread)

    def catch_up(self, tokens: Sequence[int], last: int, rows: int) -> bool:
        """Have read all committed tokens but the `last` at most, as a round that reads those anew
        and grows `rows` wants it; False where the cache doesn't hold such a round."""
        window, first = self._model.window, len(tokens) - last
        window.make_room(len(tokens), rows + 1)
        if first < window.base or not window.holds(len(tokens), rows):
            return False
        if unread := tokens[window.end : first]:
            self._calls.read(unread)
        return True

    def grow(self, rows: Sequence[int], draft: DraftTree) -> Ranked:
        return self._calls.grow(rows, draft)

    def stop(self) -> None:
        self._calls.stop()
