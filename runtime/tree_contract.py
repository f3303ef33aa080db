"""What a tree's round needs besides the contract's graphs to be one launch: three small ones.

    pick    what the draft ranked behind some rows → the tokens of other rows
    path    the target's caches → their rows on the accepted path
    place   those rows → where a chain would have written them

Caches are joined along their heads, so that one call serves all layers. Path and place are two
engines, so that no row is written before all are read: within one, nothing says that a kernel which
reads a cache is through before another writes it in place.
"""

from __future__ import annotations

from dataclasses import replace

from .contract import (
    BRANCH_WIDTH,
    LAST_ROW,
    PAST_LENGTHS,
    CacheSpec,
    GraphSpec,
    TensorSpec,
)

_MOST_ELEMENTS = 2**31 - 1  # of one tensor: TensorRT counts in 32 bits

RANKED = TensorSpec(name="ranked", dtype="int64", axes=(1, "ranked_rows", BRANCH_WIDTH))
PICKS = TensorSpec(name="picks", dtype="int64", axes=(1, "picked"))  # row · BRANCH_WIDTH + rank
PICKED = TensorSpec(name="picked_tokens", dtype="int64", axes=(1, "picked"))
# Of each row of the tree, the rows from the first draft to it; behind it a place's own row, which
# then stays where it is.
PATHS = TensorSpec(name="paths", dtype="int64", axes=("tree_rows", "depth"))
ONE_LENGTH = replace(PAST_LENGTHS, axes=(1,))
ONE_LAST_ROW = replace(LAST_ROW, axes=(1,))
CACHES, PLACED, PATH_ROWS = "past_key_values", "present", "path_rows"
#: tensors that only engines touch
ON_DEVICE = (CACHES, PLACED, PATH_ROWS)
TREE_GRAPHS = ("pick", "path", "place")


def pick_graph() -> GraphSpec:
    return GraphSpec(inputs=(RANKED, PICKS), outputs=(PICKED,))


def path_graph(cache: CacheSpec) -> GraphSpec:
    inputs = (joined(CACHES, cache), ONE_LENGTH, ONE_LAST_ROW, PATHS)
    return GraphSpec(inputs=inputs, outputs=(path_rows(cache),))


def place_graph(cache: CacheSpec) -> GraphSpec:
    """In place: CACHES and PLACED are one memory."""
    inputs = (joined(CACHES, cache), ONE_LENGTH, path_rows(cache))
    return GraphSpec(inputs=inputs, outputs=(joined(PLACED, cache),))


def joined(name: str, cache: CacheSpec) -> TensorSpec:
    heads = caches_a_call(cache) * cache.kv_heads
    axes = (1, heads, cache.max_context, cache.head_dim)
    return TensorSpec(name=name, dtype=cache.dtype, axes=axes)


def path_rows(cache: CacheSpec) -> TensorSpec:
    heads = caches_a_call(cache) * cache.kv_heads
    return TensorSpec(name=PATH_ROWS, dtype=cache.dtype, axes=(1, heads, "depth", cache.head_dim))


def caches_a_call(cache: CacheSpec) -> int:
    """How many caches are joined: an equal part of all, as large as a tensor may be."""
    count, one = 2 * cache.layers, cache.kv_heads * cache.max_context * cache.head_dim
    fitting = (n for n in range(count, 0, -1) if count % n == 0 and n * one <= _MOST_ELEMENTS)
    return next(fitting, 1)
