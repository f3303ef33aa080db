"""The reference, proved on small vocabularies: a whole round has exactly the target's law."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_sampling import (
    Law,
    Rule,
    all_prefixes,
    round_law,
    sequences,
    total_variation,
)

from runtime import reference
from runtime.sampling import SamplingParams

VOCAB, K = 4, 2
EXACT = 1e-6
TARGET_IDS = np.array([0, 2, 3])  # D < V: the draft never proposes token 1

COMBINATIONS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=2),
    SamplingParams(temperature=1.4, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.3),
    SamplingParams(temperature=1.2, top_k=3, top_p=0.8, min_p=0.1),
]


def tables(
    params: SamplingParams, draft_ids: np.ndarray, *, seed: int = 0, q_params: SamplingParams | None
) -> tuple[Law, Law]:
    """Target and draft laws over the target's ids, by prefix."""
    rng = np.random.default_rng(seed)
    target, draft = {}, {}
    for prefix in all_prefixes(VOCAB, K + 1):
        target[prefix] = reference.transformed(_logits(rng, VOCAB), params)
        q = reference.transformed(_logits(rng, len(draft_ids)), q_params or params)
        draft[prefix] = reference.over_target(q, VOCAB, draft_ids)
    return target.__getitem__, draft.__getitem__


def _logits(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.normal(0, 1.5, size).astype(np.float32)


def distance(target: Law, draft: Law, rule: Rule | None = None) -> float:
    """Total variation between a round's law and the target's own, over K + 1 tokens."""
    return total_variation(round_law(target, draft, K, rule), dict(sequences(target, (), K + 1)))


@pytest.mark.parametrize("draft_ids", [np.arange(VOCAB), TARGET_IDS], ids=["D=V", "D<V"])
@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_a_whole_round_has_the_law_of_the_target(
    params: SamplingParams, draft_ids: np.ndarray
) -> None:
    for seed in range(3):
        assert distance(*tables(params, draft_ids, seed=seed, q_params=None)) < EXACT


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_q_under_other_transforms_than_p_is_exact_too(params: SamplingParams) -> None:
    """A one-hot q is what an n-gram drafter gives."""
    for q_params in (SamplingParams(), SamplingParams(temperature=0.5, top_k=3)):
        assert distance(*tables(params, np.arange(VOCAB), q_params=q_params)) < EXACT


def test_q_taken_before_top_k_is_caught() -> None:
    cut, raw = SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0)
    target, draft = tables(cut, np.arange(VOCAB), q_params=None)
    _, uncut = tables(cut, np.arange(VOCAB), q_params=raw)
    assert distance(target, draft, Rule(q_reported=uncut)) > 0.01


def test_residual_that_is_not_renormalised_is_caught() -> None:
    target, draft = tables(SamplingParams(temperature=1.0), TARGET_IDS, q_params=None)
    assert distance(target, draft, Rule(recovered=reference.recovered)) > 0.01


def test_residual_replaced_by_p_is_caught() -> None:
    target, draft = tables(SamplingParams(temperature=1.0), np.arange(VOCAB), q_params=None)
    assert distance(target, draft, Rule(recovered=lambda p, q: p)) > 0.01


def test_bonus_from_the_row_before_is_caught() -> None:
    target, draft = tables(SamplingParams(temperature=1.0), np.arange(VOCAB), q_params=None)
    assert distance(target, draft, Rule(bonus_row=-1)) > 0.01


@pytest.mark.parametrize("broken", [np.zeros(VOCAB), np.full(VOCAB, np.nan)], ids=["0", "NaN"])
def test_broken_q_is_rejected_and_the_law_holds(broken: np.ndarray) -> None:
    target, draft = tables(SamplingParams(temperature=1.0), np.arange(VOCAB), q_params=None)
    assert distance(target, draft, Rule(q_reported=lambda prefix: broken)) < EXACT


def test_accept_integrated_over_its_uniforms_is_the_law_that_was_enumerated() -> None:
    """The decision code and the enumerated law are one rule: a fine grid of u ties them."""
    params = SamplingParams(temperature=1.0, top_p=0.9)
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1.5, (2, VOCAB)).astype(np.float32)
    p = reference.transformed(logits[0], params)
    q = reference.transformed(rng.normal(0, 1.5, VOCAB), params)
    x, n = int(q.argmax()), 400
    grid = (np.arange(n) + 0.5) / n
    ends = [reference.accept(logits, [x], q[None], [u], [0.5, 0.5], params) for u in grid]
    rate = np.mean([end.num_accepted for end in ends])
    assert abs(rate - reference.acceptance(p, q, x)) <= 1 / n
    residual = reference.recovered(p, q)
    drawn = np.bincount([reference.draw(residual, u) for u in grid], minlength=VOCAB) / n
    np.testing.assert_allclose(drawn, residual / residual.sum(), atol=1 / n)


def test_margin_tells_a_near_decision_from_a_clear_one() -> None:
    logits = np.zeros((2, 2), np.float32)  # p = ½, ½ and q(0) = 1: accepted while u < ½
    params = SamplingParams(temperature=1.0)
    near, clear = (
        reference.accept(logits, [0], np.array([[1.0, 0.0]]), [u], [0.2, 0.2], params)
        for u in (0.5 - 1e-9, 0.4)
    )
    assert near.margin < 1 < clear.margin


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), [0]),
        (SamplingParams(temperature=1.0), [0, 1, 2, 3, 4]),
        (SamplingParams(temperature=1.0, top_k=2), [0, 1, 2]),  # 1 and 2 tie at the edge
        (SamplingParams(temperature=1.0, top_p=0.39), [0]),
        (SamplingParams(temperature=1.0, top_p=0.41), [0, 1, 2]),
        (SamplingParams(temperature=1.0, min_p=0.4), [0, 1, 2]),
        (SamplingParams(temperature=1.0, top_k=4, top_p=0.81), [0, 1, 2]),  # 0.8 of 0.95
    ],
    ids=str,
)
def test_what_each_transform_keeps(params: SamplingParams, kept: list[int]) -> None:
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.15, 0.05], np.float32))
    p = reference.transformed(logits, params)
    assert np.flatnonzero(p).tolist() == kept
    assert p.sum() == pytest.approx(1)
