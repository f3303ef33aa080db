"""Lookup for trees: what followed the text's last tokens in each of the places where they stood.

A row of the tree stands for the places whose text agrees with its path; it branches where they
disagree. The confidence of a token is that of a lookup of so long a match, shared among the places.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from .acceptance import MOST_SUPPORT, prior_of_support
from .contract import BRANCH_WIDTH, MOST_TREE_NODES
from .ngram_index import NgramIndex
from .tree_shape import DraftTree, Ranked

MOST_PLACES = 16


class NgramBrancher:
    """Over the drafter's index."""

    def __init__(self, index: NgramIndex) -> None:
        self._index = index
        self._places: dict[int, list[int]] = {}  # row of the tree → where its text goes on
        self._support = 0

    @property
    def most_levels(self) -> int:
        return MOST_TREE_NODES

    def start(self, tokens: Sequence[int], rows: int) -> Ranked | None:
        begin = perf_counter()
        self._index.rollback(min(self._index.length, len(tokens)))
        self._index.extend(tokens[self._index.length :])
        match = self._index.find()
        if match is None:
            return None
        self._support = match.length
        self._places = {0: self._index.places(MOST_PLACES)}
        return self._ranked([0], 0, begin)

    def grow(self, rows: Sequence[int], draft: DraftTree) -> Ranked:
        begin = perf_counter()
        depth = 0
        for row in rows:
            parent, token = draft.parents[row - 1], draft.tokens[row - 1]
            text = self._index.tokens
            self._places[row] = [
                place + 1
                for place in self._places[parent]
                if place + 1 < len(text) and text[place] == token
            ]
        row = rows[0]
        while row:
            row, depth = draft.parents[row - 1], depth + 1
        return self._ranked(rows, depth, begin)

    def stop(self) -> None:
        self._places = {}

    def _ranked(self, rows: Sequence[int], depth: int, begin: float) -> Ranked:
        tokens = np.full((len(rows), BRANCH_WIDTH), -1, np.int64)
        probs = np.zeros((len(rows), BRANCH_WIDTH), np.float32)
        sure = prior_of_support(min(self._support + depth, MOST_SUPPORT))
        for i, row in enumerate(rows):
            shares: dict[int, float] = {}  # the latest place counts most
            for age, place in enumerate(self._places[row]):
                token = self._index.tokens[place]
                shares[token] = shares.get(token, 0.0) + 1 / (1 + age)
            best = sorted(shares.items(), key=lambda item: -item[1])[:BRANCH_WIDTH]
            whole = sum(shares.values())
            for rank, (token, share) in enumerate(best):
                tokens[i, rank], probs[i, rank] = token, max(sure, 0.1) * share / whole
        return Ranked(tokens=tokens, probs=probs, seconds=perf_counter() - begin)
