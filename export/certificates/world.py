"""A target and a draft over few tokens, and the laws that they ought to have.

Both are tables of random logits, one row for each prefix, so that any law may occur. What a round
must give is computed here by the NumPy reference alone; no graph takes part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.reference import History, adjusted, transformed
from runtime.sampling import SamplingParams

Array = NDArray[Any]
Tokens = tuple[int, ...]
Laws = dict[Tokens, float]

PROMPT = (1, 0, 1)  # what the penalties find before the round
OUTPUT = (2,)


@dataclass(frozen=True, kw_only=True)
class LawCase:
    """One sampling to be proven."""

    name: str
    params: SamplingParams
    masked: bool = False  # a mask that depends on the prefix, as a grammar's does


@dataclass(frozen=True, kw_only=True)
class World:
    """Tokens are 0 … vocab - 1; a draft with `drafts` proposes only those."""

    vocab: int
    k: int
    drafts: Tokens | None = None
    seed: int = 0

    @property
    def draft_ids(self) -> Tokens:
        return tuple(range(self.vocab)) if self.drafts is None else self.drafts

    def target_logits(self, prefix: Tokens) -> Array:  # [vocab] f32
        return self._row(prefix, stream=1)

    def draft_logits(self, prefix: Tokens) -> Array:  # [draft_vocab] f32
        """Like the target's, more or less."""
        rows = self._row(prefix, stream=1) + np.float32(0.8) * self._row(prefix, stream=2)
        return rows[list(self.draft_ids)]

    def allowed(self, prefix: Tokens) -> Array:  # [vocab] bool
        """At least two tokens, others behind another prefix."""
        rng = self._rng(prefix, stream=3)
        row = rng.random(self.vocab) < 0.6
        row[rng.permutation(self.vocab)[:2]] = True
        return row

    def _row(self, prefix: Tokens, stream: int) -> Array:
        normal = self._rng(prefix, stream).standard_normal(self.vocab)
        return (normal * 1.5).astype(np.float32)

    def _rng(self, prefix: Tokens, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream, len(prefix), *prefix])


def history(case: LawCase, world: World, prefix: Tokens) -> History:
    """What plain decoding has seen behind `prefix`."""
    allowed = world.allowed(prefix) if case.masked else None
    return History(prompt=PROMPT, output=(*OUTPUT, *prefix), allowed=allowed)


def target_row(case: LawCase, world: World, prefix: Tokens) -> Array:  # [vocab] f64
    """The target's law of the next token."""
    logits = adjusted(world.target_logits(prefix), case.params, history(case, world, prefix))
    return transformed(logits, case.params)


def draft_row(case: LawCase, world: World, prefix: Tokens) -> Array:  # [draft_vocab] f64
    """The draft's law of the next token; all zero where the mask leaves it none."""
    ids = np.array(world.draft_ids)
    before = history(case, world, prefix)
    logits = adjusted(world.draft_logits(prefix), case.params, before, ids)
    if not np.isfinite(logits).any():
        return np.zeros(len(ids))
    return transformed(logits, case.params)


def target_law(case: LawCase, world: World) -> Laws:
    """Every k + 1 tokens that the target alone may give."""
    return dict(completed(case, world, (), world.k + 1))


def completed(
    case: LawCase, world: World, prefix: Tokens, length: int
) -> Iterator[tuple[Tokens, float]]:
    """Every continuation by `length` tokens that the target alone may give."""
    if length == 0:
        yield prefix, 1.0
        return
    for token, p in enumerate(target_row(case, world, prefix)):
        if p > 0:
            for rest, share in completed(case, world, (*prefix, token), length - 1):
                yield rest, float(p) * share


def total_variation(one: Laws, other: Laws) -> float:
    keys = set(one) | set(other)
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in keys)


def _cases() -> tuple[LawCase, ...]:
    warm = SamplingParams(temperature=1.0)
    single = {
        "greedy": SamplingParams(),
        "temperature": SamplingParams(temperature=0.7),
        "top_k": replace(warm, top_k=3),
        "top_p": replace(warm, top_p=0.7),
        "min_p": replace(warm, min_p=0.2),
        "repetition_penalty": replace(warm, repetition_penalty=1.6),
        "presence_penalty": replace(warm, presence_penalty=0.9),
        "frequency_penalty": replace(warm, frequency_penalty=0.8),
        "logit_bias": replace(warm, logit_bias={1: -2.0}),
    }
    penalties = replace(
        warm, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5,
        logit_bias={1: -1.0},
    )  # fmt: skip
    together = {
        "top_k + top_p": replace(warm, top_k=3, top_p=0.8),
        "top_p + min_p": replace(warm, top_p=0.9, min_p=0.1),
        "penalties + top_k": replace(penalties, top_k=3),
        "all": replace(penalties, temperature=0.9, top_k=3, top_p=0.9, min_p=0.05),
        "greedy + penalties": replace(penalties, temperature=0.0),
    }
    masks = {
        "mask": warm,
        "greedy + mask": SamplingParams(),
        "mask + all": together["all"],
        "mask + top_p": replace(warm, top_p=0.7),
    }
    plain = [LawCase(name=n, params=p) for n, p in (single | together).items()]
    return (*plain, *(LawCase(name=n, params=p, masked=True) for n, p in masks.items()))


CASES = _cases()
