"""Rounds keep the target's law, and intervals hold what they promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers_calibration import run_compare, write_prompts
from helpers_runtime import VOCAB, latency_report, near_table, target_table, write_bundle

from calibration.comparison import graphs
from calibration.comparison.law import law, log_law, overlap
from calibration.comparison.neutral import neutral_inputs
from calibration.comparison.opened import OpenBundle
from calibration.comparison.resamples import Resamples, interval
from calibration.comparison.rounds import Drafted, judge
from calibration.comparison.speed import _best
from runtime.bundle import Bundle
from runtime.contract import CacheSpec, draft_graph
from runtime.executor import EngineOptions
from runtime.latency import LatencyProfile

ROUNDS = 8_000


def test_the_first_token_of_a_round_has_the_target_s_law() -> None:
    """8,000 rounds, 6 tokens. χ² with 5 degrees of freedom passes 38 once in 2.6 million."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(4))
    ids = np.array([0, 2, 3, 5])  # the draft doesn't know tokens 1 and 4
    laws, counts, accepted = np.stack([p, p]), np.zeros(6), 0
    for u in rng.random((ROUNDS, 4)):
        place = int(np.searchsorted(np.cumsum(q), u[0]))
        drafted = Drafted(tokens=(int(ids[place]),), q=(q,), ids=ids, q_of_token=(float(q[place]),))
        judged = judge(laws, drafted, u[1:2], u[2:4])
        counts[drafted.tokens[0] if judged.num_accepted else judged.next_token] += 1
        accepted += judged.num_accepted
    assert ((counts - ROUNDS * p) ** 2 / (ROUNDS * p)).sum() < 38
    share = overlap(p, q, ids)
    sigma = np.sqrt(share * (1 - share) / ROUNDS)
    assert abs(accepted / ROUNDS - share) < 5 * sigma  # 5 σ: once in 1.7 million


def test_a_draft_that_is_its_target_is_always_accepted(tmp_path: Path) -> None:
    table = target_table(VOCAB)
    bundle = write_bundle(tmp_path / "own", table, table)
    prompts = write_prompts(tmp_path / "prompts.jsonl", count=4)
    result = run_compare(
        bundle, "--reference", bundle, "--prompts", prompts, "--tokens", "16", "-k", "3",
        "--temperatures", "0,1", "--out", tmp_path / "out",
    )  # fmt: skip
    for row in (*result["cells"], *result["positions"]):
        assert row["acceptance"]["bundle+reference"]["value"] == pytest.approx(1, abs=1e-5)
    for length in result["lengths"]:
        assert length["realised"]["bundle+bundle"] == 4
        assert length["free"]["reference+bundle"] == 4
        assert length["predicted"]["reference+reference"] == pytest.approx(4, abs=1e-4)


def test_realised_positions_agree_with_expected_ones(tmp_path: Path) -> None:
    """12 prompts × 8 rounds at temperature 1: position 1 is tested 96 times, 4 σ: once in 15,000;
    the seed is fixed, so a pass stays one."""
    table = target_table(VOCAB)
    bundle = write_bundle(tmp_path / "near", table, near_table(table, 1.0))
    prompts = write_prompts(tmp_path / "prompts.jsonl", count=12)
    result = run_compare(
        bundle, "--reference", bundle, "--prompts", prompts, "--tokens", "12", "-k", "3",
        "--temperatures", "1", "--rounds", "8", "--free-prompts", "0", "--out", tmp_path / "out",
    )  # fmt: skip
    key = "reference+reference"
    for row in result["positions"]:
        expected, n = row["acceptance"][key]["value"], row["evaluated"][key]
        assert n > 15
        sigma = np.sqrt(expected * (1 - expected) / n)
        assert abs(row["realised"][key] - expected) < 4 * sigma
    (length,) = result["lengths"]
    assert 1.5 < length["realised"][key] < 4


def test_the_law_is_one_hot_at_the_lowest_of_equals_when_greedy() -> None:
    assert law(np.array([[1, 3, 3, 2]], np.float32), 0).tolist() == [[0, 1, 0, 0]]


def test_the_law_of_a_temperature_is_that_power_of_the_law() -> None:
    logits = np.random.default_rng(1).normal(size=(3, 9)).astype(np.float32) * 5
    cooled = law(logits, 1.0) ** (1 / 0.7)
    expected = cooled / cooled.sum(-1, keepdims=True)
    np.testing.assert_allclose(law(logits, 0.7), expected, rtol=1e-12)
    np.testing.assert_allclose(np.exp(log_law(logits)), law(logits, 1.0), rtol=1e-12)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """150 samples of 40 prompts; 95 % intervals hold the mean in about 94 %. Fewer than 84 % is 5 σ
    off, once in millions; all 150 would happen once in 10,000, and the seeds are fixed."""
    rng = np.random.default_rng(2)
    held = 0
    for i in range(150):
        sizes = rng.integers(5, 40, 40).astype(float)
        sums = sizes * (0.5 + 0.2 * rng.standard_normal(40))
        found = interval(Resamples(40, seed=i).ratio(sums.tolist(), sizes.tolist()))
        assert found is not None
        assert found.low <= found.value <= found.high
        held += found.low <= 0.5 <= found.high
    assert 0.84 < held / 150 < 1


def test_an_interval_of_nothing_is_none() -> None:
    assert interval(Resamples(4, seed=0).ratio([0.0] * 4, [0.0] * 4)) is None


def test_the_best_draft_length_is_the_one_of_most_tokens_a_second() -> None:
    """A target step takes 1 s, a row 0.1 s more, a draft step 0.1 s, a second token 0.01 s."""
    profile = LatencyProfile.from_report(latency_report(row=0.1, draft=0.1))
    good = _best(profile, [0.9, 0.8, 0.1])
    assert (good.k, good.plain_tokens_per_s) == (2, 1.0)
    assert good.tokens_per_s == pytest.approx(2.7 / (1.2 + 0.2 + 0.8 * 0.01))
    bad = _best(profile, [0.1, 0.01, 0.0])
    assert (bad.k, bad.tokens_per_s) == (0, 1.0)


def test_every_input_of_the_draft_s_contract_gets_a_value_that_fits() -> None:
    spec = draft_graph(CacheSpec(layers=1, kv_heads=1, head_dim=2, max_context=4))
    found = neutral_inputs(spec.inputs, {"batch": 1, "vocab": 5, "query_len": 1})
    assert found.keys() == {s.name for s in spec.inputs}
    for tensor in spec.inputs:
        assert found[tensor.name].dtype == tensor.dtype
        assert found[tensor.name].ndim == len(tensor.axes)
    assert found["top_p"].tolist() == [1.0]
    assert found["top_k"].tolist() == [0]


def test_calls_that_are_bound_once_give_what_new_ones_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more shapes come than calls are kept."""
    path = write_bundle(tmp_path / "bundle", target_table(VOCAB), None)
    bundle, options = Bundle.load(path), EngineOptions(threads=1, spin=False)
    lengths = (1, 3, 1, 2, 3, 1)

    def rows(most: int) -> list[np.ndarray]:
        monkeypatch.setattr(graphs, "MOST_CALLS", most)
        target = OpenBundle(bundle, options).target()
        return [target.rows([5 * j + i for i in range(n)]) for j, n in enumerate(lengths)]

    for kept, new in zip(rows(16), rows(1), strict=True):
        np.testing.assert_array_equal(kept, new)
    assert not np.array_equal(rows(16)[1], rows(16)[4])  # other tokens, other rows
