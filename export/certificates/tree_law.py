"""The law of a round over a tree of drafts, enumerated as `law` does for a chain.

Every draft that is certain is the draft's r-th likeliest token at its place; one that is drawn
stands behind its certain siblings and avoids them. All values of the drawn ones are gone through,
and for each the accept graph is asked, by bisection over one uniform at a time, at what share of
uniforms each draft passes once it is reached, and what is drawn where the round ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from runtime.errors import InvalidRequest
from runtime.tree import Tree

from .law import LIMIT, bisect, steps
from .report import Certificate, Figures, judged
from .round_graphs import STEPS, RoundGraphs
from .world import (
    CASES,
    Array,
    LawCase,
    Laws,
    Tokens,
    World,
    completed,
    draft_row,
    target_law,
    total_variation,
)

NAME = "tree law"
CLAIM = "The law of a round over a tree, enumerated, is the target's, for every transform."
PASSES = 0.0  # a uniform that every draft passes which can pass
FAILS = 1 - 1 / STEPS


@dataclass(frozen=True, kw_only=True)
class TreeCase:
    """drawn: rows of drafts that are drawn from q, each the last behind its parent."""

    tree: Tree
    drawn: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for children in self.tree.children():
            early = self.drawn & set(children[:-1])
            if early:
                raise InvalidRequest(
                    f"tree: received drawn rows {sorted(early)}. Expected only the last draft "
                    "behind a row to be drawn."
                )

    @classmethod
    def chain(cls, length: int) -> TreeCase:
        return cls(tree=Tree.chain(length), drawn=frozenset(range(1, length + 1)))


SHAPES = {
    "2 drafts, then 1 each": TreeCase(tree=Tree.of_widths([2, 1])),
    "3 drafts, the last drawn": TreeCase(tree=Tree.of_widths([3]), drawn=frozenset({3})),
    "5 drafts, uneven, the last drawn": TreeCase(tree=Tree((0, 0, 1, 1, 2)), drawn=frozenset({5})),
}


@dataclass(frozen=True, kw_only=True)
class _Drafted:
    """One assignment of tokens to the tree, and how likely it is drafted."""

    tokens: Tokens
    q: tuple[Array, ...]  # of the drawn ones, in their order
    mass: float


def certify(progress: Callable[[str], None] = lambda _: None) -> Certificate:
    """Small vocabularies through graphs of this version."""
    figures: Figures = {"limit": LIMIT, "total_variation": {}}
    faults = []
    for name, shape in SHAPES.items():
        world = World(vocab=4, k=shape.tree.depth)
        graphs = RoundGraphs.small(world)
        for case in CASES:
            progress(f"{name}: {case.name}")
            found = distance(case, world, graphs, shape)
            figures["total_variation"][f"{name}: {case.name}"] = found
            if not found <= LIMIT:
                faults.append(f"{name}, {case.name}: total variation {found:.2g}")
    figures["worst"] = max(figures["total_variation"].values())
    return judged(NAME, CLAIM, figures, faults)


def distance(case: LawCase, world: World, graphs: RoundGraphs, shape: TreeCase) -> float:
    """Total variation between the law of a round and the target's own; world.k is the depth."""
    return total_variation(round_law(case, world, graphs, shape), target_law(case, world))


def round_law(case: LawCase, world: World, graphs: RoundGraphs, shape: TreeCase) -> Laws:
    """The law of depth + 1 tokens as a round of the graphs gives it."""
    law: Laws = {}
    for drafted in _drafts(case, world, shape):
        for prefix, mass in _committed(case, world, graphs, shape, drafted):
            for rest, share in completed(case, world, prefix, world.k + 1 - len(prefix)):
                law[rest] = law.get(rest, 0.0) + mass * share
    return law


def _drafts(case: LawCase, world: World, shape: TreeCase) -> Iterator[_Drafted]:
    def extend(tokens: Tokens, q: tuple[Array, ...], mass: float) -> Iterator[_Drafted]:
        row = len(tokens) + 1
        if row > shape.tree.size:
            yield _Drafted(tokens=tokens, q=q, mass=mass)
            return
        prefix = _prefix(shape.tree, tokens, shape.tree.parents[row - 1])
        ranked = np.argsort(-world.draft_logits(prefix), kind="stable")
        rank = shape.tree.ranks[row - 1]
        if row not in shape.drawn:
            yield from extend((*tokens, world.draft_ids[ranked[rank]]), q, mass)
            return
        law = _drawn_law(case, world, prefix, ranked[:rank])
        for i in np.flatnonzero(law):
            token = world.draft_ids[i]
            yield from extend((*tokens, token), (*q, law), mass * float(law[i]))

    yield from extend((), (), 1.0)


def _drawn_law(case: LawCase, world: World, prefix: Tokens, avoided: Array) -> Array:
    """q [draft_vocab] f32 without the certain siblings; their rest evenly where nothing is left."""
    law = draft_row(case, world, prefix)
    law[avoided] = 0
    if law.sum() == 0:
        law[:] = 1
        law[avoided] = 0
    q: Array = (law / law.sum()).astype(np.float32)
    return q / q.sum(dtype=np.float64)


def _prefix(tree: Tree, tokens: Tokens, row: int) -> Tokens:
    return tuple(tokens[at - 1] for at in tree.path(row))


def _committed(
    case: LawCase, world: World, graphs: RoundGraphs, shape: TreeCase, drafted: _Drafted
) -> Iterator[tuple[Tokens, float]]:
    """What the round commits, and how likely, drafting included."""
    tree = shape.tree
    asked = _Asked(case, world, graphs, shape, drafted)
    passes, drawn = asked.passes(), asked.drawn()
    reached = np.zeros(tree.size + 1)
    reached[0] = drafted.mass
    for row, children in enumerate(tree.children()):
        left = reached[row]
        for child in children:
            reached[child] = left * passes[child - 1]
            left *= 1 - passes[child - 1]
        prefix = _prefix(tree, drafted.tokens, row)
        for token in np.flatnonzero(drawn[row]) if left > 0 else ():
            yield (*prefix, int(token)), float(left * drawn[row][token])


class _Asked:
    """One drafted tree before the accept graph; only uniforms change."""

    def __init__(
        self,
        case: LawCase,
        world: World,
        graphs: RoundGraphs,
        shape: TreeCase,
        drafted: _Drafted,
    ) -> None:
        self._tree, self._vocab = shape.tree, world.vocab
        self._ids = graphs.places.ids
        self._session = graphs.accept_session
        tree, places = shape.tree, graphs.places
        behind = [_prefix(tree, drafted.tokens, row) for row in range(tree.size + 1)]
        logits = np.array([world.target_logits(prefix) for prefix in behind])
        q = np.zeros((1, max(1, len(drafted.q)), places.draft_vocab), np.float32)
        for i, law in enumerate(drafted.q):
            q[0, i, list(places.columns)] = law
        order = {row: i for i, row in enumerate(sorted(shape.drawn))}
        rows = [order.get(row, -1) for row in range(1, tree.size + 1)]
        self._feed = {
            "logits": places.spread(logits, filler=float("-inf"))[None],
            "draft_tokens": np.array([[places.ids[x] for x in drafted.tokens]], np.int64),
            "draft_probs": q,
            "parents": np.array([tree.parents], np.int64),
            "q_rows": np.array([rows], np.int64),
            "visible": tree.visible[None],
            "past_lengths": np.zeros(1, np.int32),
            **places.inputs(case, world, behind),
        }

    def passes(self) -> Array:
        """Share of uniforms at which each draft passes, once it is put to the test: [nodes]."""
        nodes, tree = self._tree.size, self._tree
        ways = np.array([self._way(row) for row in range(1, nodes + 1)])

        def holds(uniforms: Array) -> Array:
            table = ways.copy()
            table[np.arange(nodes), np.arange(nodes)] = uniforms
            last = self._run(table, np.zeros((nodes, nodes + 1)))[0]
            return np.array([row in tree.path(int(end)) for row, end in enumerate(last, start=1)])

        return bisect(holds, nodes)

    def drawn(self) -> list[Array]:
        """What is drawn behind each row where the round ends there: [vocab] each."""
        rows, edges = np.divmod(
            np.arange((self._tree.size + 1) * (self._vocab - 1)), self._vocab - 1
        )
        table = np.array([self._way(int(row), through=True) for row in rows])

        def holds(uniforms: Array) -> Array:
            draws = np.repeat(uniforms[:, None], self._tree.size + 1, 1)
            last, token = self._run(table, draws)
            order = np.argsort(self._ids)
            found = order[np.searchsorted(self._ids, token, sorter=order)]
            # −1 where no uniform ends it there: such a row is never read.
            return np.where(last == rows, found, -1) <= edges

        below = bisect(holds, len(edges)).reshape(self._tree.size + 1, -1)
        return [steps(row) for row in below]

    def _way(self, row: int, *, through: bool = False) -> Array:
        """Uniforms [nodes] that lead to the test of this row; `through`: that end the round there.

        What stands on the way passes, all else fails.
        """
        path = self._tree.path(row)
        passing = path if through else path[:-1]
        return np.where(np.isin(np.arange(1, self._tree.size + 1), passing), PASSES, FAILS)

    def _run(self, accepts: Array, draws: Array) -> list[Array]:
        batch = {name: np.repeat(value, len(draws), 0) for name, value in self._feed.items()}
        batch |= {
            "accept_uniforms": accepts.astype(np.float32),
            "draw_uniforms": draws.astype(np.float32),
        }
        result: list[Array] = self._session.run(["last_row", "next_token"], batch)
        return result
