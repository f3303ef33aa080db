"""What drafts in a comparison: the bundle's own drafter, or a target in a draft's place.

Each is given all committed tokens and finds out itself what it has read of them: a row counts as
long as the tokens up to it are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime import drafter as runtime_drafter
from runtime.buffers import RoundBuffers
from runtime.bundle import Bundle
from runtime.constraint import Constraint
from runtime.manifest import EagleDraft, MedusaDraft, ModelDraft
from runtime.reference import draw
from runtime.sampling import SamplingParams

from .graphs import NonFinite, TargetGraph
from .law import law

Array = NDArray[Any]

ComparedDraft = ModelDraft | EagleDraft | MedusaDraft  # drafters with weights to round
SUM_SLACK = 0.01  # q further from a sum of 1 is no distribution


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """x_1 … x_n and the laws they were drawn from."""

    tokens: tuple[int, ...]
    q: tuple[Array, ...]  # each [D] f64
    ids: Array  # [D], the target id of each entry, ascending
    q_of_token: tuple[float, ...]  # 0 where the draft's own map doesn't know its token


class Drafter(Protocol):
    """What drafts a round's tokens."""

    def begin(self) -> None:
        """Forget all that was read."""

    def propose(
        self, tokens: Sequence[int], k: int, temperature: float, uniforms: Array
    ) -> Drafted:
        """At most k tokens behind the committed `tokens`; uniforms: [k]."""


class TargetAsDraft:
    """A target that drafts for another one: the quantized one is nearly always accepted.

    `read`: the tokens that its cache holds.
    """

    def __init__(self, target: TargetGraph, read: Sequence[int]) -> None:
        self._target = target
        self._ids: Array = np.arange(target.vocab)
        self._first, self._read = list(read), list(read)

    def begin(self) -> None:
        self._read = list(self._first)

    def propose(
        self, tokens: Sequence[int], k: int, temperature: float, uniforms: Array
    ) -> Drafted:
        valid = min(common_prefix(self._read, tokens), len(tokens) - 1)
        self._target.graph.length = valid
        unread, drafts, laws = list(tokens[valid:]), list[int](), list[Array]()
        for uniform in uniforms[:k]:
            laws.append(law(self._target.rows(unread)[-1], temperature))
            drafts.append(draw(laws[-1], float(uniform)))
            unread = [drafts[-1]]
        self._read = [*tokens, *drafts[:-1]]
        return _drafted(drafts, laws, self._ids)


class BundleDrafter:
    """The drafter of a bundle, which writes into `buffers`.

    ids: entries of q that the target doesn't know (a padded draft) are left out.
    """

    def __init__(
        self, drafter: runtime_drafter.Drafter, buffers: RoundBuffers, bundle: Bundle
    ) -> None:
        self._drafter, self._buffers, self._path = drafter, buffers, bundle.path
        self._constraint = Constraint(buffers.sampling.allowed)
        size, vocab = bundle.manifest.draft_vocab_size, bundle.manifest.target.vocab_size
        ids = np.arange(size) if bundle.d2t is None else np.arange(size) + bundle.d2t
        self._ids: Array = ids[ids < vocab]
        self._read: list[int] = []

    def begin(self) -> None:
        self._read = []

    def propose(
        self, tokens: Sequence[int], k: int, temperature: float, uniforms: Array
    ) -> Drafted:
        buffers = self._buffers
        self._drafter.rollback(min(common_prefix(self._read, tokens), len(tokens) - 1))
        buffers.sampling.begin(SamplingParams(temperature=temperature), ())
        buffers.draft_uniforms[:k] = uniforms[:k]
        buffers.set_last(tokens)
        wanted = self._drafter.offer(tokens, k).num_tokens
        count = 0
        if wanted:
            count = self._drafter.propose(tokens, wanted, self._constraint).num_drafted
        drafts = buffers.block[0, 2 : 2 + count].tolist()
        self._read = [*tokens, *drafts[:-1]]
        rows = enumerate(buffers.draft_probs[0, :count])
        laws = [self._law(row, len(tokens) + i) for i, row in rows]
        return _drafted(drafts, laws, self._ids)

    def _law(self, q: Array, position: int) -> Array:
        """[D] f64 of one row. Raises NonFinite."""
        if not abs(q.sum() - 1) < SUM_SLACK:  # false for NaN, too
            received = f"a q that sums to {q.sum()}, not 1, behind {position} tokens"
            raise NonFinite(self._path, "draft", received, "--draft-precision")
        return q[: len(self._ids)].astype(np.float64)


def _drafted(tokens: Sequence[int], laws: Sequence[Array], ids: Array) -> Drafted:
    own = tuple(_q_of(token, q, ids) for token, q in zip(tokens, laws, strict=True))
    return Drafted(tokens=tuple(tokens), q=tuple(laws), ids=ids, q_of_token=own)


def _q_of(token: int, q: Array, ids: Array) -> float:
    """0 for a token that `ids` doesn't hold."""
    place = int(np.searchsorted(ids, token))
    return float(q[place]) if place < len(ids) and ids[place] == token else 0.0


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
