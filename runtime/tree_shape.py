"""How a round's drafts may branch, as a user asks for it, and how a tree of them is grown.

A drafter ranks what may follow a row; which of that becomes a draft is decided here, the same for
all. Static: the shape says it. Dynamic (EAGLE-2, arXiv 2406.16858, section 4): the likeliest rows
of each level are expanded, by the product of confidences along their path, and of all drafts that
were seen the best are verified.

Invariant: what is drafted depends on the committed text alone, never on a uniform, so that every
draft is certain and the test of the accept graph exact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .contract import BRANCH_WIDTH, MOST_TREE_NODES
from .errors import InvalidRequest
from .tree import Tree

DYNAMIC = "dynamic"
DYNAMIC_DEPTH = 5
DYNAMIC_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """What may follow each of some rows, the likeliest first; siblings are different tokens."""

    tokens: NDArray[np.int64]  # [rows, width]; −1 where there are no more
    probs: NDArray[np.float32]  # [rows, width]
    seconds: float

    def of_row(self, i: int, most: int) -> list[tuple[int, float]]:
        """Tokens and their confidence, at most so many."""
        pairs = zip(self.tokens[i, :most].tolist(), self.probs[i, :most].tolist(), strict=True)
        return [pair for pair in pairs if pair[0] >= 0]


class Brancher(Protocol):
    """A drafter that ranks tokens; it knows nothing of which are chosen."""

    @property
    def most_levels(self) -> int:
        """The deepest draft that it can make."""

    def start(self, tokens: Sequence[int], rows: int) -> Ranked | None:
        """What may follow the committed `tokens`; None where it has nothing to say.

        `rows`: at most so many will be grown.
        """

    def grow(self, rows: Sequence[int], draft: DraftTree) -> Ranked:
        """What may follow these rows of a growing tree; each is asked for once, parents first."""

    def stop(self) -> None:
        """The tree is complete: be as if only committed tokens had been read."""


@dataclass(kw_only=True)
class DraftTree:
    """Drafts so far: of every row but the root its token, its parent and its confidence."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]  # log of the product of confidences along the path

    @classmethod
    def empty(cls) -> DraftTree:
        return cls(tokens=[], parents=[], scores=[])

    def add(self, parent: int, token: int, prob: float) -> int:
        """Returns the new row."""
        score = self.scores[parent - 1] if parent else 0.0
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score + float(np.log(max(prob, 1e-30))))
        return len(self.tokens)

    def only(self, rows: Sequence[int]) -> DraftTree:
        """These rows, in order; with each its parent."""
        new = {0: 0} | {row: i + 1 for i, row in enumerate(rows)}
        return DraftTree(
            tokens=[self.tokens[row - 1] for row in rows],
            parents=[new[self.parents[row - 1]] for row in rows],
            scores=[self.scores[row - 1] for row in rows],
        )

    @property
    def tree(self) -> Tree:
        return Tree(tuple(self.parents))


class TreeShape(Protocol):
    """What a request may ask for."""

    @property
    def nodes(self) -> int:
        """Most drafts."""

    @property
    def depth(self) -> int:
        """Levels of them."""

    @property
    def width(self) -> int:
        """Most drafts behind one row."""

    def grown(self, brancher: Brancher, first: Ranked, nodes: int) -> tuple[DraftTree, float]:
        """At most `nodes` drafts, and the seconds that the brancher took behind `first`."""


@dataclass(frozen=True, kw_only=True)
class StaticTree:
    """The drafts of these ranks, whatever their confidence; `name` is what a report calls it."""

    tree: Tree
    name: str = ""

    @property
    def nodes(self) -> int:
        return self.tree.size

    @property
    def depth(self) -> int:
        return self.tree.depth

    @property
    def width(self) -> int:
        return self.tree.width

    def __str__(self) -> str:
        return self.name or f"static:{self.nodes}"

    def grown(self, brancher: Brancher, first: Ranked, nodes: int) -> tuple[DraftTree, float]:
        shape = level_by_level(self.tree)
        children, place = shape.children(), {0: 0}  # rows of the shape → of the draft
        draft, seconds, level, found = DraftTree.empty(), 0.0, [0], first
        for depth in range(1, shape.depth + 1):
            for i, row in enumerate(level):
                ranked = found.of_row(i, len(children[row]))
                for child, (token, prob) in zip(children[row], ranked, strict=False):
                    if len(draft.tokens) < nodes:
                        place[child] = draft.add(place[row], token, prob)
            below = [child for row in level for child in children[row] if child in place]
            level = [row for row in below if children[row]]
            if not level or len(draft.tokens) == nodes or depth == brancher.most_levels:
                break
            found = brancher.grow([place[row] for row in level], draft)
            seconds += found.seconds
        return draft, seconds


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """The `nodes` likeliest drafts of those seen in `depth` levels of `width` expanded rows."""

    nodes: int
    depth: int = DYNAMIC_DEPTH
    width: int = DYNAMIC_WIDTH

    def __post_init__(self) -> None:
        for name, least, most in (
            ("nodes", 1, MOST_TREE_NODES),
            ("depth", 1, MOST_TREE_NODES),
            ("width", 1, BRANCH_WIDTH),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidRequest(f"tree: {name}: received {value}. Expected {least} to {most}.")

    def __str__(self) -> str:
        return f"{DYNAMIC}:{self.nodes}:{self.depth}:{self.width}"

    def grown(self, brancher: Brancher, first: Ranked, nodes: int) -> tuple[DraftTree, float]:
        seen, seconds = DraftTree.empty(), 0.0
        level = self._add(seen, [0], first)
        for _ in range(min(self.depth, brancher.most_levels) - 1):
            best = sorted(_best(seen, level, self.width))
            if not best:
                break
            found = brancher.grow(best, seen)
            seconds += found.seconds
            level = self._add(seen, best, found)
        kept = _best(seen, range(1, len(seen.tokens) + 1), min(nodes, self.nodes))
        return seen.only(sorted(kept)), seconds

    def _add(self, seen: DraftTree, rows: Sequence[int], ranked: Ranked) -> list[int]:
        return [
            seen.add(row, token, prob)
            for i, row in enumerate(rows)
            for token, prob in ranked.of_row(i, self.width)
        ]


def _best(draft: DraftTree, rows: Sequence[int], count: int) -> list[int]:
    """The likeliest; of equal ones the first, so that a parent comes before its children."""
    return sorted(rows, key=lambda row: (-draft.scores[row - 1], row))[:count]


def level_by_level(tree: Tree) -> Tree:
    """The same tree with its rows ordered by depth, siblings in their order."""
    children, order = tree.children(), [0]
    for row in order:
        order += children[row]
    new = {row: i for i, row in enumerate(order)}
    return Tree(tuple(new[tree.parents[row - 1]] for row in order[1:]))


def parse_tree(text: str) -> StaticTree | DynamicTree:
    """`4x2x1`: widths level by level; `dynamic:16`, `dynamic:16:5:4`: nodes, depth, width; or a
    list of paths in JSON, as Medusa writes it: `[[0], [1], [0, 0]]`.

    Raises InvalidRequest.
    """
    try:
        if text.startswith(f"{DYNAMIC}:"):
            return DynamicTree(
                **dict(
                    zip(("nodes", "depth", "width"), map(int, text.split(":")[1:]), strict=False)
                )
            )
        if text.lstrip().startswith("["):
            return StaticTree(tree=Tree.of_paths(json.loads(text)))
        widths = [int(width) for width in text.split("x")]
        if not widths or not all(1 <= width <= BRANCH_WIDTH for width in widths):
            raise ValueError(text)
        return StaticTree(tree=Tree.of_widths(widths), name=text)
    except InvalidRequest:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidRequest(
            f"tree: received {text!r}. Expected widths such as 4x2x1, {DYNAMIC}:NODES[:DEPTH"
            "[:WIDTH]], or a list of paths such as [[0], [1], [0, 0]]."
        ) from error
