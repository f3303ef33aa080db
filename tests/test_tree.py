"""Shapes of trees: rows, depths, ancestors, Medusa's paths; what grows from ranked candidates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import InvalidRequest
from runtime.contract import BRANCH_WIDTH
from runtime.tree import Tree
from runtime.tree_shape import DraftTree, DynamicTree, Ranked, StaticTree, parse_tree


@st.composite
def trees(draw: st.DrawFn, most: int = 9) -> Tree:
    size = draw(st.integers(0, most))
    return Tree(tuple(draw(st.integers(0, i)) for i in range(size)))


@given(tree=trees())
def test_a_row_sees_itself_its_ancestors_and_the_root(tree: Tree) -> None:
    for row in range(tree.size + 1):
        seen = set(np.flatnonzero(tree.visible[row]).tolist())
        assert seen == {0, *tree.path(row)}
        assert tree.depths[row] == len(tree.path(row)) == len(seen) - 1
    assert tree.depth == max(tree.depths)


@given(tree=trees())
def test_children_stand_in_the_order_of_their_ranks(tree: Tree) -> None:
    for row, children in enumerate(tree.children()):
        assert [tree.parents[child - 1] for child in children] == [row] * len(children)
        assert [tree.ranks[child - 1] for child in children] == list(range(len(children)))


@given(tree=trees(), data=st.data())
def test_without_a_draft_all_behind_it_go(tree: Tree, data: st.DataObject) -> None:
    banned = data.draw(st.sets(st.integers(1, max(1, tree.size)), max_size=3))
    rest, rows = tree.without(banned)
    assert rows == [r for r in range(1, tree.size + 1) if not banned & set(tree.path(r))]
    assert rest.size == len(rows)
    for new, old in enumerate(rows, start=1):
        assert [rows[at - 1] for at in rest.path(new)] == tree.path(old)


def test_a_chain_is_the_tree_of_width_1() -> None:
    assert Tree.chain(3) == Tree.of_widths([1, 1, 1]) == Tree.of_paths([[0], [0, 0], [0, 0, 0]])
    assert (Tree.chain(3).visible == np.tri(4, dtype=bool)).all()


def test_medusas_paths() -> None:
    tree = Tree.of_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    assert tree.parents == (0, 0, 1, 1, 2, 3)
    assert tree.ranks == (0, 1, 0, 1, 0, 0)
    with pytest.raises(InvalidRequest, match="Expected every path once"):
        Tree.of_paths([[0], [1, 0]])
    with pytest.raises(InvalidRequest, match="rank above 0"):
        Tree.of_paths([[1]])
    with pytest.raises(InvalidRequest, match="Expected every path once"):
        Tree.of_paths([[0], [0]])


def test_a_draft_before_its_parent_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="received parent row 2"):
        Tree((0, 2))


@pytest.mark.parametrize(
    "text", ["", "0x2", "x", "9x1", "dynamic:", "dynamic:a", "[0]", "{}", "[[0,"]
)
def test_what_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="tree: received"):
        parse_tree(text)


@pytest.mark.parametrize("text", ["dynamic:0", "dynamic:65", "dynamic:4:0", "dynamic:4:2:9"])
def test_a_dynamic_tree_beyond_its_limits_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="Expected 1 to"):
        parse_tree(text)


class Table:
    """Ranks tokens by a table over paths: token = 10 · path + rank, its confidence given."""

    def __init__(self, probs: Sequence[float], levels: int = 9) -> None:
        self._probs = np.array(probs, np.float32)
        self.most_levels = levels
        self.asked: list[list[int]] = []

    def start(self, tokens: Sequence[int], rows: int) -> Ranked:
        return self._ranked([0])

    def grow(self, rows: Sequence[int], draft: DraftTree) -> Ranked:
        self.asked.append(list(rows))
        return self._ranked([draft.tokens[row - 1] for row in rows])

    def stop(self) -> None:
        return

    def _ranked(self, before: list[int]) -> Ranked:
        width = len(self._probs)
        tokens = np.array([[10 * b + r + 1 for r in range(width)] for b in before], np.int64)
        return Ranked(tokens=tokens, probs=np.tile(self._probs, (len(before), 1)), seconds=0.0)


def grown(shape: StaticTree | DynamicTree, table: Table, nodes: int = 64) -> DraftTree:
    return shape.grown(table, table.start([], nodes), nodes)[0]


def test_a_static_tree_takes_the_ranks_that_it_names() -> None:
    shape = StaticTree(tree=Tree.of_paths([[0], [1], [1, 0], [1, 1], [1, 1, 0]]))
    table = Table([0.6, 0.3])
    draft = grown(shape, table)
    assert draft.tokens == [1, 2, 21, 22, 221]
    assert draft.parents == [0, 0, 2, 2, 4]
    assert table.asked == [[2], [4]]  # only rows that have drafts behind them


@given(tree=trees(), nodes=st.integers(0, 12))
def test_a_static_tree_is_cut_to_what_there_is_room_for(tree: Tree, nodes: int) -> None:
    draft = grown(StaticTree(tree=tree), Table([0.5] * BRANCH_WIDTH), nodes)
    if tree.width <= BRANCH_WIDTH:
        assert len(draft.tokens) == min(nodes, tree.size)
    assert sorted(Tree(tuple(draft.parents)).depths) == sorted(tree.depths)[: len(draft.tokens) + 1]


def test_fewer_levels_than_asked_for() -> None:
    assert (
        len(grown(StaticTree(tree=Tree.of_widths([2, 2, 2])), Table([0.6, 0.3], levels=2)).tokens)
        == 6
    )
    assert max(grown(DynamicTree(nodes=20), Table([0.6, 0.3], levels=1)).parents) == 0


@given(
    probs=st.lists(st.floats(0.01, 0.6), min_size=1, max_size=4),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 4),
)
def test_a_dynamic_tree_keeps_the_likeliest_of_what_it_saw(
    probs: list[float], nodes: int, depth: int
) -> None:
    """With a width that expands all there is, they are the likeliest of all paths."""
    probs = sorted(probs, reverse=True)
    shape = DynamicTree(nodes=nodes, depth=depth, width=8)
    every = [1.0]
    chances: list[float] = []
    for _ in range(depth):
        if len(every) > 8:
            return  # more rows than are expanded
        every = [e * float(np.float32(p)) for e in every for p in probs]
        chances += every
    draft = grown(shape, Table(probs))
    found = sorted(np.exp(draft.scores), reverse=True)
    np.testing.assert_allclose(found, sorted(chances, reverse=True)[:nodes], rtol=1e-4)
    Tree(tuple(draft.parents))  # every draft with its parent


def test_what_has_no_more_candidates_ends_there() -> None:
    first = Ranked(tokens=np.array([[7, -1]]), probs=np.array([[0.9, 0]], np.float32), seconds=0.0)
    none = Ranked(tokens=np.full((1, 2), -1), probs=np.zeros((1, 2), np.float32), seconds=0.0)

    class Ending(Table):
        def grow(self, rows: Sequence[int], draft: DraftTree) -> Ranked:
            return none

    for shape in (StaticTree(tree=Tree.of_widths([2, 2, 1])), DynamicTree(nodes=8)):
        assert shape.grown(Ending([0.5, 0.5]), first, 8)[0].tokens == [7]
