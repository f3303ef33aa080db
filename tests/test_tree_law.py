"""A round over any tree gives the target's own law: enumerated, no sampling, so no luck."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_sampling import (
    LOGIT_KINDS,
    accept_session,
    chains,
    columns,
    neutral,
    row_of_logits,
    sampling_params,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from export import accept_graph
from export.certificates.law import LIMIT
from export.certificates.round_graphs import RoundGraphs
from export.certificates.tree_law import TreeCase, distance, round_law
from export.certificates.world import CASES, LawCase, World, target_law, total_variation
from runtime import InvalidRequest, SamplingParams
from runtime.tree import Tree

WARM = LawCase(name="warm", params=SamplingParams(temperature=1.0))
BY_NAME = {case.name: case for case in CASES}
SHAPES = {
    "chain": TreeCase.chain(2),
    "two certain": TreeCase(tree=Tree.of_widths([2, 1])),
    "three, the last drawn": TreeCase(tree=Tree.of_widths([3]), drawn=frozenset({3})),
    "two levels, last drawn": TreeCase(tree=Tree.of_widths([2, 2]), drawn=frozenset({2, 4, 6})),
    "uneven": TreeCase(tree=Tree((0, 0, 1, 1, 2)), drawn=frozenset({5})),
}
FEW = ("greedy", "temperature", "top_p", "all", "mask + all", "greedy + penalties")


def graphs(world: World) -> RoundGraphs:
    return RoundGraphs.small(world)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_is_the_targets(shape: str, name: str) -> None:
    world = World(vocab=4, k=SHAPES[shape].tree.depth)
    assert distance(BY_NAME[name], world, graphs(world), SHAPES[shape]) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("drafts", [None, (0, 2, 3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_for_every_transform(
    shape: str, drafts: tuple[int, ...] | None, case: LawCase
) -> None:
    world = World(vocab=4 if drafts is None else 5, k=SHAPES[shape].tree.depth, drafts=drafts)
    assert distance(case, world, graphs(world), SHAPES[shape]) <= LIMIT


@st.composite
def shapes(draw: st.DrawFn) -> TreeCase:
    """Up to five drafts, at most three behind a row, two levels; some of the last ones drawn."""
    parents: list[int] = []
    for i in range(draw(st.integers(1, 5))):
        tree = Tree(tuple(parents))
        open_rows = [
            row for row in range(i + 1) if tree.depths[row] < 2 and len(tree.children()[row]) < 3
        ]
        parents.append(draw(st.sampled_from(open_rows)))
    tree = Tree(tuple(parents))
    last = [children[-1] for children in tree.children() if children]
    return TreeCase(tree=tree, drawn=frozenset(draw(st.sets(st.sampled_from(last), max_size=2))))


@given(shape=shapes(), name=st.sampled_from(FEW), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=12)
def test_the_law_over_random_trees(shape: TreeCase, name: str, seed: int) -> None:
    world = World(vocab=4, k=shape.tree.depth, seed=seed)
    assert distance(BY_NAME[name], world, graphs(world), shape) <= LIMIT


def test_the_order_of_siblings_changes_no_law() -> None:
    """Nor does the order in which rows of different parents stand."""
    one = Tree((0, 0, 1, 1, 2))
    other = Tree((0, 1, 0, 1, 3))  # the same tree, depth first
    world = World(vocab=4, k=2)
    laws = [round_law(WARM, world, graphs(world), TreeCase(tree=tree)) for tree in (one, other)]
    assert total_variation(*laws) < LIMIT
    assert total_variation(laws[0], target_law(WARM, world)) < LIMIT


def test_only_the_last_draft_behind_a_row_may_be_drawn() -> None:
    with pytest.raises(InvalidRequest, match="Expected only the last draft"):
        TreeCase(tree=Tree((0, 0)), drawn=frozenset({1}))


def residual_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later sibling is tested against all of p."""
    sound = accept_graph._siblings_before
    monkeypatch.setattr(
        accept_graph, "_siblings_before", lambda op, given: op.Mul(sound(op, given), 0.0)
    )


def rejected_drafts_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw knows nothing of certain drafts that were rejected."""
    monkeypatch.setattr(accept_graph, "_without", lambda op, given, p, rejected: p)


def drawn_against_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual takes q from p as if nothing had been rejected before."""
    sound = accept_graph._recovered

    def faulty(op, given, p, rejected, left):
        return sound(op, given, p, rejected, op.Add(op.Mul(left, 0.0), 1.0))

    monkeypatch.setattr(accept_graph, "_recovered", faulty)


def penalties_of_cousins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row counts every draft in front of it, its ancestors or not."""

    def faulty(op, visible):
        rows = op.Shape(visible, start=1, end=2)
        ones = op.Expand(1.0, op.Concat([1], rows, rows, axis=0))
        return op.Slice(op.Trilu(ones, upper=0), [1], [2**31], [2])

    monkeypatch.setattr(accept_graph, "rows_behind_drafts", faulty)


FAULTS = {
    residual_as_it_was: (WARM, SHAPES["two certain"]),
    rejected_drafts_drawn_again: (WARM, SHAPES["two certain"]),
    drawn_against_the_whole: (WARM, SHAPES["three, the last drawn"]),
    penalties_of_cousins: (BY_NAME["presence_penalty"], SHAPES["uneven"]),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_shows(monkeypatch: pytest.MonkeyPatch, fault) -> None:
    fault(monkeypatch)
    case, shape = FAULTS[fault]
    world = World(vocab=4, k=shape.tree.depth)
    assert distance(case, world, graphs(world), shape) > 1e-3


def test_a_broken_q_costs_acceptance_and_not_the_law() -> None:
    """A row that is no distribution is rejected, behind certain siblings as well."""
    world = World(vocab=4, k=1)
    shape = SHAPES["three, the last drawn"]
    session = graphs(world).accept_session
    feed = {
        "logits": np.log(np.array([[[0.1, 0.2, 0.3, 0.4]] * 4], np.float32)),
        "draft_tokens": np.array([[0, 1, 2]]),
        "draft_probs": np.full((1, 1, 4), np.nan, np.float32),
        "parents": np.array([shape.tree.parents]),
        "q_rows": np.array([[-1, -1, 0]]),
        "visible": shape.tree.visible[None],
        "past_lengths": np.zeros(1, np.int32),
        "accept_uniforms": np.array([[0.999, 0.999, 0.0]], np.float32),
        "draw_uniforms": np.full((1, 4), 0.5, np.float32),
        **graphs(world).places.inputs(WARM, world, [()] * 4),
    }
    accepted, token = session.run(["num_accepted", "next_token"], feed)
    assert (accepted[0], token[0]) == (0, 3)  # 2 or 3 are left; u = 0.5 falls into 3


@given(
    seed=st.integers(0, 10_000),
    k=st.integers(0, 4),
    params=sampling_params,
    kind=st.sampled_from(LOGIT_KINDS),
)
@settings(deadline=None, max_examples=60)
def test_a_tree_of_one_path_is_the_chain(
    seed: int, k: int, params: SamplingParams, kind: str
) -> None:
    """Token for token: certain drafts as a tree, and as a chain whose rows of q are one-hot."""
    rng, vocab = np.random.default_rng(seed), 300
    drafts = rng.integers(0, vocab, k)
    logits = row_of_logits(rng, kind, (1, k + 1, vocab))
    uniforms = {"accept_uniforms": rng.random((1, k)), "draw_uniforms": rng.random((1, k + 1))}
    feed = {
        "logits": logits,
        "draft_tokens": drafts[None],
        "draft_probs": np.eye(vocab, dtype=np.float32)[drafts][None],
        "past_lengths": np.zeros(1, np.int32),
        **{name: value.astype(np.float32) for name, value in uniforms.items()},
        **columns([params]),
        **neutral([params], vocab, k + 1),
        **chains(1, k + 1),
    }
    session = accept_session(vocab)
    one, other = (
        session.run(None, feed | {"q_rows": rows}) for rows in (feed["q_rows"], np.full((1, k), -1))
    )
    assert [x.tolist() for x in one] == [x.tolist() for x in other]


@given(seed=st.integers(0, 10_000), params=sampling_params)
@settings(deadline=None, max_examples=40)
def test_rows_in_another_order_decide_the_same(seed: int, params: SamplingParams) -> None:
    """Level by level or depth first: each draft keeps its logits, its number and its place."""
    rng, vocab, tree = np.random.default_rng(seed), 300, Tree((0, 0, 1, 1, 2))
    order = [0, 1, 3, 4, 2, 5]  # of rows, depth first
    again = Tree(tuple(order.index(tree.parents[row - 1]) for row in order[1:]))
    tokens = rng.permutation(vocab)[: tree.size]
    feed = {
        "logits": row_of_logits(rng, "normal", (1, 6, vocab)),
        "accept_uniforms": rng.random((1, 5)).astype(np.float32),
        "draw_uniforms": rng.random((1, 6)).astype(np.float32),
    }
    # A row's likeliest tokens are its drafts, so that some are accepted.
    for draft, parent in zip(tokens, tree.parents, strict=True):
        feed["logits"][0, parent, draft] += 8
    drafts = [row - 1 for row in order[1:]]
    moved = {
        "logits": feed["logits"][:, order],
        "accept_uniforms": feed["accept_uniforms"][:, drafts],
        "draw_uniforms": feed["draw_uniforms"][:, order],
    }
    one = _decided(feed, tree, tokens, params)
    other = _decided(moved, again, tokens[drafts], params)
    assert one[:2] == other[:2]
    assert order.index(one[2]) == other[2]


def _decided(
    feed: dict[str, np.ndarray], tree: Tree, tokens: np.ndarray, params: SamplingParams
) -> tuple[int, int, int]:
    rows, vocab = tree.size + 1, feed["logits"].shape[-1]
    given_tree = {
        "draft_tokens": tokens[None],
        "draft_probs": np.zeros((1, 1, vocab), np.float32),
        "parents": np.array([tree.parents]),
        "q_rows": np.full((1, tree.size), -1),
        "visible": tree.visible[None],
        "past_lengths": np.zeros(1, np.int32),
    }
    everything = feed | given_tree | columns([params]) | neutral([params], vocab, rows)
    accepted, token, last, _ = accept_session(vocab).run(None, everything)
    return int(accepted[0]), int(token[0]), int(last[0])
