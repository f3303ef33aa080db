"""The choice of k: what pays is drafted, what doesn't is not, and asking costs little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers_runtime import EOS, VOCAB, latency_report, target_table, write_bundle
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import BundleError, Decoder, SamplingParams
from runtime.acceptance import AcceptanceByPosition
from runtime.latency import LatencyProfile
from runtime.offer import Offer
from runtime.outcome import Outcome
from runtime.planner import AdaptiveDraftLength, FixedDraftLength

K = 6


def profile(row: float, draft: float) -> LatencyProfile:
    return LatencyProfile.from_report(latency_report(row=row, draft=draft, max_draft_tokens=K))


def adaptive(costs: LatencyProfile) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(costs, AcceptanceByPosition(K), K)


def outcome(num_drafted: int, num_accepted: int) -> Outcome:
    return Outcome(
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        tokens=(0,) * (num_accepted + 1),
        draft_s=0.0,
        verify_s=0.0,
        accept_s=0.0,
    )


def simulate(
    costs: LatencyProfile, alphas: list[float], seed: int = 0, window: int = 128
) -> tuple[float, list[int]]:
    """Seconds per token over plain decoding's, and the plan; alphas: acceptance, per token."""
    rng = np.random.default_rng(seed)
    planner = adaptive(costs)
    done, unread, seconds, plan = 0, 60, 0.0, []
    while done < len(alphas):
        offer = Offer(num_tokens=K, unread=min(unread, window))
        choice = planner.choose(offer, len(alphas) - done)
        k = choice.k
        if k:
            seconds += costs.read_s(min(unread, window))
        seconds += costs.round_s(k)
        accepted = 0
        while accepted < k and rng.random() < alphas[done]:
            accepted += 1
        planner.observe(choice, outcome(k, accepted))
        plan.append(k)
        done += accepted + 1
        unread = unread + 1 if k == 0 else 1 + (accepted == k)
    return seconds / done / costs.round_s(0), plan


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("tokens", [128, 1000])
def test_a_draft_that_never_fits_costs_little(alpha: float, tokens: int) -> None:
    for seed in range(5):
        cost, plan = simulate(profile(0.25, 0.15), [alpha] * tokens, seed)
        assert cost < 1.035 if tokens == 128 else cost < 1.02
        assert plan.count(0) / len(plan) > 0.9


@pytest.mark.parametrize(("alpha", "least"), [(0.7, 1.1), (0.85, 1.35), (0.95, 1.8)])
def test_a_draft_that_fits_pays(alpha: float, least: float) -> None:
    cost, plan = simulate(profile(0.2, 0.12), [alpha] * 1000)
    assert 1 / cost > least
    assert plan.count(0) < 0.05 * len(plan)


def test_free_rows_call_for_long_drafts() -> None:
    _, plan = simulate(profile(0.0, 0.02), [0.9] * 500)
    assert np.median(plan) == K


def test_dear_rows_call_for_none() -> None:
    cost, plan = simulate(profile(1.0, 0.5), [0.9] * 500)
    assert cost < 1.02
    assert plan.count(0) / len(plan) > 0.95


def test_a_change_of_text_is_noticed() -> None:
    """A thousand tokens that no draft fits, then a thousand that nearly all fit."""
    cost, plan = simulate(profile(0.2, 0.1), [0.0] * 1000 + [0.95] * 1000)
    assert cost < 0.85
    assert np.mean(plan[-50:]) > 2


@given(
    row=st.floats(0, 1.5),
    draft=st.floats(0.01, 1.0),
    alpha=st.floats(0, 1),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_never_much_worse_than_plain(row: float, draft: float, alpha: float, seed: int) -> None:
    """Odds of failing falsely: the seeds are few and fixed, the bound has room for bad luck."""
    cost, _ = simulate(profile(row, draft), [alpha] * 400, seed)
    assert cost < 1.06


def test_the_same_history_gives_the_same_plan() -> None:
    costs = profile(0.25, 0.15)
    assert simulate(costs, [0.5] * 300, seed=3) == simulate(costs, [0.5] * 300, seed=3)


def test_room_is_kept() -> None:
    planner = adaptive(profile(0.0, 0.01))
    rooms = [Offer(num_tokens=n) for n in (6, 3, 1, 0)]
    assert [planner.choose(offer, None).k for offer in rooms] == [6, 3, 1, 0]
    assert [FixedDraftLength(4).choose(offer, None).k for offer in rooms] == [4, 3, 1, 0]


def test_the_estimate_is_conditional_per_position() -> None:
    estimate, offer = AcceptanceByPosition(3), Offer(num_tokens=3)
    for _ in range(200):
        estimate.observe(offer, outcome(3, 1))  # the first always fits, the second never
    first, second, third = estimate.reached(offer)
    assert first > 0.9
    assert second < 0.2
    assert third < second


def test_a_decoder_plans_by_the_bundles_profile(tmp_path: Path) -> None:
    table = target_table(VOCAB)
    table[:, EOS] = -50.0
    far = np.roll(table, 1, axis=1)
    report = latency_report(row=0.2, draft=0.1)
    params = SamplingParams(max_tokens=80)
    path = write_bundle(tmp_path / "good", table, table, latency=report)
    with Decoder.load(path, threads=1) as decoder:
        stats = decoder.generate([1, 2], params).stats
        assert stats.num_plain_steps == 0
        assert (stats.mean_acceptance_length or 0) > 3
    path = write_bundle(tmp_path / "far", table, far, latency=report)
    with Decoder.load(path, threads=1) as decoder:
        result = decoder.generate([1, 2], params)
        assert result.stats.num_spec_steps < 12
        assert result.token_ids == decoder.generate([1, 2], params, num_draft_tokens=0).token_ids


def test_gaps_of_a_profile_are_filled_linearly() -> None:
    report = latency_report(row=0.5, draft=0.1) | {"verify_s": {"1": 1.0, "5": 3.0}}
    costs = LatencyProfile.from_report(report)
    assert costs.round_s(2) == pytest.approx(2.0 + 2 * 0.1)
    assert costs.round_s(6) == pytest.approx(4.0 + 6 * 0.1)


@pytest.mark.parametrize(
    "change",
    [{"verify_s": {}}, {"verify_s": {"one": 1.0}}, {"draft_s": None}, {"overhead_s": -1.0}],
)
def test_a_profile_that_does_not_fit_names_the_key(change: dict[str, object]) -> None:
    with pytest.raises(BundleError, match=next(iter(change))):
        LatencyProfile.from_report(latency_report(row=0.5, draft=0.1) | change)
