"""What a tree's shape says of its growth: as the host grows it, call by call, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tree import trees

from runtime.branch_calls import BranchCalls
from runtime.contract import BRANCH_WIDTH
from runtime.growth import Growth
from runtime.tree import Tree
from runtime.tree_shape import DraftTree, Ranked, StaticTree, level_by_level

EXPANDED = 64  # rows that a test ranks at most


class Ranks:
    """A branch graph that ranks what a table holds, and keeps what it was told.

    table: [calls' rows, BRANCH_WIDTH], those of the root first.
    """

    def __init__(self, table: np.ndarray) -> None:
        self.table, self.asked = table, 0
        self.told: list[dict[str, np.ndarray]] = []

    def bind(self, inputs, outputs):  # type: ignore[no-untyped-def]
        graph = self

        class Call:
            def run(self) -> float:
                graph.told.append({name: value.copy() for name, value in inputs.items()})
                top = outputs["top_tokens"][0]
                top[:] = graph.table[graph.asked : graph.asked + len(top)]
                outputs["top_probs"][:] = 0.1
                graph.asked += len(top)
                return 0.0

        return Call()


class ByCalls:
    """A draft model's way to make trees, over that graph."""

    most_levels = 64

    def __init__(self, graph: Ranks, committed: int) -> None:
        self.lengths = np.array([committed], np.int32)
        self.calls = BranchCalls(graph, self.lengths, {}, {})  # type: ignore[arg-type]

    def start(self, tokens: Sequence[int], rows: int) -> Ranked:
        return self.calls.read(tokens)

    def grow(self, rows: Sequence[int], draft: DraftTree) -> Ranked:
        return self.calls.grow(rows, draft)

    def stop(self) -> None:
        self.calls.stop()


@given(tree=trees(most=20), committed=st.integers(0, 50), seed=st.integers(0, 99))
def test_the_tables_are_what_the_host_does(tree: Tree, committed: int, seed: int) -> None:
    if not tree.size or tree.width > BRANCH_WIDTH:
        return
    table = np.random.default_rng(seed).permutation(EXPANDED * BRANCH_WIDTH)
    graph = Ranks(table.reshape(EXPANDED, BRANCH_WIDTH))
    brancher = ByCalls(graph, committed)
    draft, _ = StaticTree(tree=tree).grown(brancher, brancher.start([7], tree.size), tree.size)
    growth = Growth(level_by_level(tree))
    assert draft.tree == growth.tree
    assert draft.tokens == table[growth.picks[0]].tolist()
    assert graph.asked == growth.ranked_rows
    assert len(graph.told) == 1 + len(growth.levels)
    for told, level in zip(graph.told[1:], growth.levels, strict=True):
        assert np.array_equal(told["input_ids"], table[level.picks])
        assert np.array_equal(told["depths"], level.depths)
        assert np.array_equal(told["visible"], level.visible)
        assert told["past_lengths"] == committed + 1 + level.first
        assert level.visible.flags.c_contiguous


@given(tree=trees(most=20))
def test_a_path_names_its_rows_and_then_places_that_stay(tree: Tree) -> None:
    for row, places in enumerate(Growth(tree).paths.tolist()):
        path = tree.path(row)
        assert places[: len(path)] == path
        assert places[len(path) :] == list(range(len(path) + 1, tree.depth + 1))


def test_a_level_in_full() -> None:
    growth = Growth(Tree.of_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]]))
    assert growth.reads == 4
    assert [level.rows for level in growth.levels] == [(1, 2), (5,)]
    assert growth.picks.tolist() == [[0, 1, 8, 16, 17, 24]]
    assert growth.levels[1].picks.tolist() == [[17]]
    assert growth.levels[1].visible.tolist() == [[[False, True, True]]]
    assert growth.levels[1].depths.tolist() == [[0, 0, 1]]
    assert growth.levels[1].ranked == slice(3, 4)
    assert growth.ranked_rows == 4


@pytest.mark.parametrize("widths", [[1], [8], [4, 2, 1]])
def test_a_shape_of_widths(widths: list[int]) -> None:
    growth = Growth(Tree.of_widths(widths))
    assert growth.reads == len(widths) + 1
    assert len(growth.levels) == len(widths) - 1
