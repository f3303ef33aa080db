"""Rounds over real sessions: what they commit, and what they leave in the caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from helpers_runtime import (
    EOS,
    VOCAB,
    near_table,
    reference_greedy,
    reference_sampled,
    target_table,
    write_bundle,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import Decoder, SamplingParams
from runtime.draft_model import DraftModel
from runtime.planner import Choice
from runtime.sequence import FinishReason

PROMPT = [5, 17, 101, 3]
TABLE = target_table(VOCAB)
TABLE[:, EOS] = -50.0  # these models never end by themselves
NEAR = near_table(TABLE, 0.6)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=40)
KS = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """A draft near its target: a mix of accepts and rejections."""
    path = tmp_path_factory.mktemp("near") / "bundle"
    with Decoder.load(write_bundle(path, TABLE, NEAR), threads=1) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """A draft that is its target."""
    path = tmp_path_factory.mktemp("twin") / "bundle"
    with Decoder.load(write_bundle(path, TABLE, TABLE), threads=1) as decoder:
        yield decoder


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def lengths(decoder: Decoder) -> tuple[int, int]:
    stats = decoder.stats
    assert stats is not None
    return stats.target_rows, stats.draft_rows


@pytest.mark.parametrize("k", KS)
def test_greedy_is_the_targets_own_text_at_every_k(decoder: Decoder, k: int) -> None:
    result = decoder.generate(PROMPT, greedy(60), num_draft_tokens=k)
    assert list(result.token_ids) == reference_greedy(TABLE, PROMPT, 60)


@pytest.mark.parametrize("k", KS)
def test_sampling_is_the_papers_algorithm_token_for_token(decoder: Decoder, k: int) -> None:
    result = decoder.generate(PROMPT, SAMPLED, num_draft_tokens=k)
    assert list(result.token_ids) == reference_sampled(TABLE, NEAR, PROMPT, 40, k, SAMPLED)


@pytest.mark.parametrize("params", [greedy(41), SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_that_is_the_target_is_always_accepted(
    twin: Decoder, params: SamplingParams
) -> None:
    stats = twin.generate(PROMPT, params, num_draft_tokens=4).stats
    assert stats.acceptance_rate == 1.0
    assert stats.acceptance_histogram == [0, 0, 0, 0, 8]
    assert stats.mean_acceptance_length == 5.0


@pytest.mark.parametrize("name", ["decoder", "twin"])
def test_both_caches_follow_the_committed_tokens(request: pytest.FixtureRequest, name: str) -> None:
    decoder: Decoder = request.getfixturevalue(name)
    fulls: list[bool] = []
    decoder.on_round = lambda o: fulls.append(o.num_accepted == o.num_drafted)
    committed = len(PROMPT)
    try:
        for chunk in decoder.stream(PROMPT, greedy(60), num_draft_tokens=3):
            first = committed == len(PROMPT)
            committed += len(chunk.token_ids)
            target_rows, draft_rows = lengths(decoder)
            assert target_rows == committed - 1
            if first:
                assert draft_rows == 0  # nothing was drafted yet
            elif chunk.finish_reason is None:
                assert draft_rows == committed - 1 - fulls[-1]
    finally:
        decoder.on_round = None
    assert any(fulls)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("params", [greedy(30), SAMPLED], ids=["greedy", "sampled"])
def test_a_request_is_the_same_after_any_other(
    decoder: Decoder, params: SamplingParams, k: int
) -> None:
    before = decoder.generate(PROMPT, params, num_draft_tokens=k)
    decoder.generate([9] * 50, SamplingParams(temperature=1.5, seed=1, max_tokens=20))
    decoder.generate([*PROMPT, 8], greedy(3), num_draft_tokens=4)
    with closing(decoder.stream(PROMPT, SAMPLED, num_draft_tokens=2)) as cancelled:
        next(cancelled)
        next(cancelled)
    assert decoder.generate(PROMPT, params, num_draft_tokens=k).token_ids == before.token_ids


def test_rollback_then_replay_writes_the_same_bits(decoder: Decoder) -> None:
    """Rows of rejected drafts are overwritten, so the valid rows equal a plain run's."""
    rounds = decoder._open_rounds()
    drafter = rounds.drafter
    assert isinstance(drafter, DraftModel)
    caches = {}
    for k in (4, 0):
        decoder.generate(PROMPT, greedy(50), num_draft_tokens=k)
        rows = lengths(decoder)[0]
        caches[k] = rounds.target.caches["past_key_values.0.key"][:, :, :rows].copy()
    np.testing.assert_array_equal(caches[4], caches[0])
    tokens = [*PROMPT, *reference_greedy(TABLE, PROMPT, 50)]
    assert caches[0].ravel().tolist() == tokens[:-1]


def test_a_draft_left_behind_by_plain_rounds_catches_up(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same draws as a draft that never fell behind."""
    plan = iter([0] * 20 + [3] * 10)
    monkeypatch.setattr(
        "runtime.planner.FixedDraftLength.choose",
        lambda self, offer, remaining: Choice(offer=offer, k=next(plan)),
    )
    drafted: list[int] = []
    decoder.on_round = lambda o: drafted.append(o.num_accepted) if o.num_drafted else None
    try:
        tokens = [
            token
            for chunk in decoder.stream(PROMPT, greedy(25), num_draft_tokens=3)
            for token in chunk.token_ids
        ]
    finally:
        decoder.on_round = None
    assert tokens == reference_greedy(TABLE, PROMPT, 25)
    prompt = [*PROMPT, *tokens[:20]]
    clean = decoder.generate(prompt, greedy(5), num_draft_tokens=3)
    assert drafted[0] == clean.stats.acceptance_histogram.index(1)


def test_a_draft_far_behind_starts_anew_near_the_end(tmp_path: Path) -> None:
    """A long prompt is read from its last tokens on; the text stays the target's own."""
    path = write_bundle(tmp_path / "bundle", TABLE, NEAR, context=320)
    prompt = [i * 7 % 250 for i in range(200)]
    with Decoder.load(path, threads=1) as decoder:
        result = decoder.generate(prompt, greedy(100), num_draft_tokens=4)
        assert list(result.token_ids) == reference_greedy(TABLE, prompt, 100)
        assert result.stats.draft_rows >= 295  # to the end, past the window


@pytest.mark.parametrize("k", KS)
def test_an_end_token_inside_a_block_ends_there(tmp_path: Path, k: int) -> None:
    table = TABLE.copy()
    greedy_text = reference_greedy(table, PROMPT, 8)
    end = greedy_text[6]
    assert end not in greedy_text[:6]
    path = write_bundle(tmp_path / "bundle", table, table, eos=(end,))
    with Decoder.load(path, threads=1) as decoder:
        result = decoder.generate(PROMPT, num_draft_tokens=k)
        assert list(result.token_ids) == greedy_text[:7]
        assert result.finish_reason is FinishReason.EOS
        assert lengths(decoder)[0] == len(PROMPT) + 6
        assert lengths(decoder)[1] <= len(PROMPT) + 6
        assert result.stats.num_output_tokens == 7
        went_on = decoder.generate(
            PROMPT, SamplingParams(max_tokens=8, ignore_eos=True), num_draft_tokens=k
        )
        assert list(went_on.token_ids) == greedy_text


def test_a_rejected_end_token_does_not_end(tmp_path: Path) -> None:
    draft = TABLE.copy()
    draft[:, EOS] = 50.0  # the draft always proposes the end
    with Decoder.load(write_bundle(tmp_path / "bundle", TABLE, draft), threads=1) as decoder:
        result = decoder.generate(PROMPT, greedy(30), num_draft_tokens=4)
        assert list(result.token_ids) == reference_greedy(TABLE, PROMPT, 30)
        assert result.stats.num_accepted_draft_tokens == 0


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_cuts_a_round(twin: Decoder, max_tokens: int) -> None:
    result = twin.generate(PROMPT, greedy(max_tokens), num_draft_tokens=4)
    assert len(result.token_ids) == max_tokens == result.stats.num_output_tokens
    assert result.finish_reason is FinishReason.LENGTH
    assert lengths(twin)[0] == len(PROMPT) + max_tokens - 1
    assert lengths(twin)[1] <= lengths(twin)[0]


@pytest.mark.parametrize("k", KS)
def test_the_context_ends_a_sequence_without_a_row_beyond_it(twin: Decoder, k: int) -> None:
    result = twin.generate(PROMPT, num_draft_tokens=k)
    assert result.finish_reason is FinishReason.CONTEXT
    assert len(PROMPT) + len(result.token_ids) == 96
    assert list(result.token_ids) == reference_greedy(TABLE, PROMPT, 96 - len(PROMPT))
    longest = twin.generate([1] * 95, num_draft_tokens=k)
    assert len(longest.token_ids) == 1


def test_a_shared_prompt_prefix_changes_nothing(tmp_path: Path) -> None:
    """Whole chunks of a common prefix are kept from request to request."""
    path = write_bundle(tmp_path / "bundle", TABLE, NEAR, context=512)
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 250, 300).tolist()
    with Decoder.load(path, threads=1) as decoder:
        for tail in ([1, 2, 3], [4], [], [7] * 100):
            prompt = [*stem, *tail]
            for params in (greedy(20), SAMPLED):
                result = decoder.generate(prompt, params, num_draft_tokens=3)
                if params.greedy:
                    assert list(result.token_ids) == reference_greedy(TABLE, prompt, 20)
                with Decoder.load(path, threads=1) as clean:
                    again = clean.generate(prompt, params, num_draft_tokens=3)
                assert result.token_ids == again.token_ids


def test_a_trimmed_draft_vocabulary(tmp_path: Path) -> None:
    """Draft ids are mapped to the target's; q is zero elsewhere."""
    ids = np.sort(np.random.default_rng(3).permutation(256)[:120])
    draft = np.ascontiguousarray(near_table(TABLE, 0.3)[:, ids])
    d2t = ids - np.arange(len(ids))
    path = write_bundle(tmp_path / "bundle", TABLE, draft, d2t=d2t)
    with Decoder.load(path, threads=1) as decoder:
        text = decoder.generate(PROMPT, greedy(40), num_draft_tokens=3)
        assert list(text.token_ids) == reference_greedy(TABLE, PROMPT, 40)
        assert text.stats.num_accepted_draft_tokens > 0
        sampled = decoder.generate(PROMPT, SAMPLED, num_draft_tokens=3)
        expected = reference_sampled(TABLE, draft, PROMPT, 40, 3, SAMPLED, ids)
        assert list(sampled.token_ids) == expected


@given(
    plan=st.lists(st.integers(0, 4), min_size=60, max_size=60),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=30),
    seed=st.integers(0, 2**64 - 1),
)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_plan_of_draft_lengths_keeps_the_invariants(
    decoder: Decoder, plan: list[int], prompt: list[int], seed: int
) -> None:
    """Greedy text does not depend on the plan; a replay of a sampled one gives the same tokens."""

    def run(params: SamplingParams) -> list[int]:
        steps = iter(plan)
        tokens: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "runtime.planner.FixedDraftLength.choose",
                lambda self, offer, _: Choice(offer=offer, k=min(next(steps), offer.num_tokens)),
            )
            for chunk in decoder.stream(prompt, params, num_draft_tokens=4):
                tokens += chunk.token_ids
                target_rows, draft_rows = lengths(decoder)
                assert target_rows == len(prompt) + len(tokens) - 1
                assert draft_rows <= target_rows
        return tokens

    assert run(greedy(50)) == reference_greedy(TABLE, prompt, 50)
    sampled = SamplingParams(temperature=1.0, seed=seed, max_tokens=50)
    assert run(sampled) == run(sampled)
