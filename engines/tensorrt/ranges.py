"""How large each symbolic axis may become: optimization profiles from a bundle's limits.

One table from an axis's name to its range, for every graph alike; an axis that isn't in it stops
the build, so that a new input can't get a range by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from runtime.engine_contract import LEAST_CONTEXT
from runtime.errors import BuildError
from runtime.manifest import Limits

PREFILL_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class Range:
    """Least, usual and most elements; the engine is fastest at the usual."""

    least: int
    usual: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.usual <= self.most:
            raise ValueError(f"received {self}. Expected least <= usual <= most.")

    @classmethod
    def fixed(cls, size: int) -> Range:
        return cls(least=size, usual=size, most=size)


Ranges = Mapping[str, Range]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of call: its name goes into errors and reports."""

    name: str
    ranges: Ranges

    def shapes(self, value: ir.Value) -> tuple[tuple[int, ...], ...] | None:
        """Least, usual and most shape of a graph input; None where it is static."""
        assert value.shape is not None
        axes = [self._range(value, axis) for axis in value.shape]
        if all(isinstance(axis, int) for axis in value.shape):
            return None
        return tuple(tuple(getattr(a, end) for a in axes) for end in ("least", "usual", "most"))

    def _range(self, value: ir.Value, axis: int | ir.SymbolicDim) -> Range:
        if isinstance(axis, int):
            return Range.fixed(axis)
        name = str(axis.value)
        if name not in self.ranges:
            raise BuildError(
                f"{value.name}: received an axis {name!r}. Expected one of "
                f"{', '.join(sorted(self.ranges))}; give it a range in engines.tensorrt.ranges."
            )
        return self.ranges[name]


def target_profiles(limits: Limits) -> tuple[Profile, ...]:
    """Prefill in chunks; a plain decoding step or verification, 1 to k + 1 rows.

    No profile has an axis fixed at 1 that another has not: TensorRT-RTX then keeps the weights of
    every product over it a second time (measured: a plan of 561 MB in place of 326 MB).
    """
    rows = min(PREFILL_ROWS, limits.max_context)
    few = _verified(limits)
    return (
        _decoder("prefill", limits, Range(least=1, usual=rows, most=rows), replace(few, usual=1)),
        _decoder("verify", limits, few, few),
    )


def draft_profiles(limits: Limits, context: int) -> tuple[Profile, ...]:
    """Catching up on what was committed, and a step; `context`: rows of the draft's cache."""
    rows = min(PREFILL_ROWS, context)
    many, one = Range(least=1, usual=rows, most=rows), Range.fixed(1)
    few = Range(least=1, usual=1, most=2)
    own = Limits(
        max_batch=limits.max_batch,
        max_context=context,
        max_draft_tokens=min(limits.max_draft_tokens, context - 1),
    )
    return (_decoder("prefill", own, many, one), _decoder("step", own, few, one))


def branch_profiles(limits: Limits, context: int) -> tuple[Profile, ...]:
    """What may follow committed text that is read, and what may follow the rows of a tree's level;
    both see columns of either."""
    rows, nodes = min(PREFILL_ROWS, context), max(2, limits.max_tree_nodes)
    many, few = Range(least=1, usual=rows, most=rows), Range(least=1, usual=1, most=2)
    level = Range(least=1, usual=min(4, nodes), most=nodes)
    own = replace(limits, max_context=context, max_draft_tokens=min(nodes, context - 1))
    return (_decoder("read", own, many, few), _decoder("grow", own, level, level))


def eagle_profiles(limits: Limits, context: int) -> tuple[Profile, ...]:
    """Pairs of committed tokens, all that are new in one call; and a step on the head's own state,
    or the pairs of one round."""
    many, one = _rows(context), Range.fixed(1)
    few = replace(_verified(replace(limits, max_tree_nodes=0)), usual=1)
    own = replace(
        limits,
        max_context=context,
        max_draft_tokens=min(limits.max_draft_tokens, context - 1),
        max_tree_nodes=0,
    )
    return (_decoder("prefill", own, many, one), _decoder("step", own, few, one))


def fuse_profiles(limits: Limits, context: int) -> tuple[Profile, ...]:
    """The states of as many rows as the head reads at once."""
    few = _verified(replace(limits, max_tree_nodes=0))
    ranges = {"batch": _batch(limits)}
    return (
        Profile(name="prefill", ranges={**ranges, "query_len": _rows(context)}),
        Profile(name="verify", ranges={**ranges, "query_len": few}),
    )


def heads_profiles(limits: Limits) -> tuple[Profile, ...]:
    """Medusa's, of one state, whose shapes are all fixed."""
    return (Profile(name="step", ranges={"batch": _batch(limits), "query_len": Range.fixed(1)}),)


def tail_profiles(limits: Limits) -> tuple[Profile, ...]:
    """What samples one draft, behind up to all others of its round."""
    k = limits.max_draft_tokens
    drafted = Range(least=0, usual=k // 2, most=k)
    return (Profile(name="step", ranges={"batch": _batch(limits), "drafted": drafted}),)


def rank_profiles(limits: Limits, heads: int) -> tuple[Profile, ...]:
    """What every one of Medusa's heads ranks first."""
    ranges = {"batch": _batch(limits), "num_logits": Range.fixed(heads)}
    return (Profile(name="rank", ranges=ranges),)


def accept_profiles(limits: Limits) -> tuple[Profile, ...]:
    """The acceptance of 1 to k drafts, more in a tree.

    Never 0: TensorRT has no gather from nothing. A plain draw is one draft whose q is all 0: it is
    never accepted, and what is drawn then has the law of p.
    """
    most = max(1, limits.max_draft_tokens, limits.max_tree_nodes)
    k = Range(least=1, usual=(most + 1) // 2, most=most)
    return (_accept("verify", limits, k),)


def _rows(context: int) -> Range:
    """Of one call that reads committed text."""
    rows = min(PREFILL_ROWS, context)
    return Range(least=1, usual=rows, most=rows)


def tree_round_profiles(limits: Limits) -> tuple[Profile, ...]:
    """Of `runtime.tree_contract`: any tree that the limits admit, a single draft among them."""
    nodes = max(1, limits.max_tree_nodes)
    drafts = Range(least=1, usual=min(8, nodes), most=nodes)
    ranges = {
        **dict.fromkeys(("picked", "ranked_rows"), drafts),
        "depth": Range(least=1, usual=min(4, nodes), most=nodes),
        "tree_rows": Range(least=2, usual=drafts.usual + 1, most=nodes + 1),
    }
    return (Profile(name="tree", ranges=ranges),)


def _verified(limits: Limits) -> Range:
    """At least two sizes, so that nothing is fixed."""
    most = max(2, limits.max_draft_tokens + 1, limits.max_tree_nodes + 1)
    return Range(least=1, usual=min(most, limits.max_draft_tokens // 2 + 1), most=most)


def _decoder(name: str, limits: Limits, query: Range, logits: Range) -> Profile:
    k, batch = limits.max_draft_tokens, _batch(limits)
    if limits.max_tree_nodes:
        # TensorRT-RTX 1.7 fails on the mask of a tree, read by two layers or more, where the batch
        # is fixed at 1: "Graph contains more than one op named …_iota".
        batch = replace(batch, most=max(2, batch.most))
    ranges = {
        "batch": batch,
        "query_len": query,
        "tree_len": query,
        "num_logits": logits,
        "context": _context(limits.max_context),
        "drafted": Range(least=0, usual=k // 2, most=k),
    }
    return Profile(name=name, ranges=ranges)


def _accept(name: str, limits: Limits, k: Range) -> Profile:
    rows = Range(least=k.least + 1, usual=k.usual + 1, most=k.most + 1)
    drawn = max(1, limits.max_draft_tokens)  # drafts of a tree are certain, and have no q
    q_rows = Range(least=1, usual=min(k.usual, drawn), most=drawn)
    ranges = {"batch": _batch(limits), "k": k, "k_plus_1": rows, "num_q_rows": q_rows}
    return Profile(name=name, ranges=ranges)


def _batch(limits: Limits) -> Range:
    return Range(least=1, usual=1, most=limits.max_batch)


def _context(most: int) -> Range:
    least = min(LEAST_CONTEXT, most)
    return Range(least=least, usual=max(least, min(1024, most)), most=most)
