"""Penalties, bias, bans and minimum length through whole requests on real sessions.

An oracle written from the definitions says which tokens must come out, token for token; the rest
are the properties that users count on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_decode import (
    ASKED,
    FAVOURITES,
    KS,
    NEAR,
    PROMPT,
    SAMPLED,
    TABLE,
    TOKENS,
    came_out,
    generate,
    oracle,
    params_of,
)
from helpers_runtime import (
    EOS,
    STATES,
    VOCAB,
    reference_greedy,
    write_bundle,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import Decoder, Grammar, InvalidRequest, SamplingParams
from runtime.sequence import FinishReason

# Token for token.


@pytest.mark.parametrize("name", ASKED)
def test_greedy_text_is_the_plain_loop_s_at_every_k(decoder: Decoder, name: str) -> None:
    params = params_of(name)
    expected = oracle(params).decode(0)
    asks_nothing = SamplingParams(max_tokens=TOKENS)
    assert expected != oracle(asks_nothing).decode(0)
    for k in KS:
        result = generate(decoder, params, k)
        assert came_out(result) == expected, k
        assert (result.stats.num_accepted_draft_tokens > 0) == (k > 0)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", ASKED)
def test_sampling_is_the_papers_algorithm_token_for_token(
    decoder: Decoder, name: str, k: int
) -> None:
    params = params_of(name, **SAMPLED)
    assert came_out(generate(decoder, params, k)) == oracle(params).decode(k)


sampled_requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 0, 3, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.02]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.6]),
    presence_penalty=st.sampled_from([0.0, 2.0, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.8]),
    logit_bias=st.dictionaries(
        st.sampled_from([*FAVOURITES[:8], EOS]), st.sampled_from([-100.0, -2.0, 6.0]), max_size=5
    ),
    banned_tokens=st.lists(st.sampled_from([*FAVOURITES, EOS]), max_size=30).map(tuple),
    min_tokens=st.integers(0, 14),
    max_tokens=st.integers(14, 20),
    seed=st.integers(0, 2**64 - 1),
)


@given(
    params=sampled_requests,
    prompt=st.lists(st.sampled_from([*range(12), *FAVOURITES[:9]]), min_size=1, max_size=20),
    k=st.integers(0, 4),
)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_request_gives_the_oracle_s_tokens(
    decoder: Decoder, params: SamplingParams, prompt: list[int], k: int
) -> None:
    """A request after any other, too: they all run on one decoder."""
    result = decoder.generate(prompt, params, num_draft_tokens=k)
    assert came_out(result) == oracle(params, prompt=tuple(prompt)).decode(k)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ASKED)
def test_a_draft_that_is_the_target_is_always_accepted(
    twin: Decoder, name: str, sampling: dict[str, float]
) -> None:
    """The draft sees the history and the mask of every row, or it would be rejected."""
    params = params_of(name, **sampling, ignore_eos=name != "min_tokens")
    stats = generate(twin, params, 4).stats
    assert stats.num_draft_tokens > 0
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize("name", ["together", "bans"])
def test_a_trimmed_draft(tmp_path: Path, name: str) -> None:
    ids = np.sort(np.random.default_rng(3).permutation(257)[:120])
    draft = np.ascontiguousarray(NEAR[:, ids])
    path = write_bundle(tmp_path / "bundle", TABLE, draft, d2t=ids - np.arange(len(ids)))
    with Decoder.load(path, threads=1) as decoder:
        for sampling in ({}, SAMPLED):
            params = params_of(name, **sampling)
            result = generate(decoder, params, 3)
            expected = oracle(params, draft=draft, target_ids=ids).decode(3)
            assert came_out(result) == expected
            assert result.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("name", ["nothing", "together", "bans", "repetition"])
def test_a_draft_padded_beyond_its_target(tmp_path: Path, name: str) -> None:
    """It loves its padding, which no target can read: it is never drafted."""
    draft = np.concatenate([NEAR, np.full((STATES, 6), NEAR.max() + 2, np.float32)], 1)
    path = write_bundle(tmp_path / "bundle", TABLE, draft)
    with Decoder.load(path, threads=1) as decoder:
        for sampling in ({}, SAMPLED):
            others = {"max_tokens": TOKENS, **ASKED.get(name, {}), **sampling}
            params = SamplingParams(**others)  # type: ignore[arg-type]
            result = generate(decoder, params, 3)
            assert came_out(result) == oracle(params, draft=draft).decode(3)
            assert result.stats.num_accepted_draft_tokens > 0


# Reproducible: alone, again, after others, after a cancelled stream, after a refused request.


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ASKED)
def test_a_request_is_the_same_after_any_other(
    decoder: Decoder, name: str, sampling: dict[str, float], k: int
) -> None:
    params = params_of(name, **sampling)
    before = generate(decoder, params, k).token_ids
    generate(decoder, params_of("together", temperature=1.3, seed=1), 4)
    generate(decoder, SamplingParams(grammar=Grammar.regex("[ab]{5,9}"), max_tokens=9), 2)
    with closing(decoder.stream([1, 2], params_of("bans"), num_draft_tokens=4)) as cancelled:
        next(cancelled)
        next(cancelled)
    with pytest.raises(InvalidRequest):
        decoder.generate([1], SamplingParams(banned_tokens=tuple(range(VOCAB))))
    assert generate(decoder, params, k).token_ids == before


# Penalties.

FIRST, SECOND, THIRD = 65, 66, 67  # A, B, C in the order that a flat model likes them


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """A model that says the same behind everything: 3.0 − 0.4 · n for the n-th token from A on."""
    row = np.full(VOCAB, -20.0, np.float32)
    row[FIRST : FIRST + 20] = 3.0 - 0.4 * np.arange(20)
    table = np.tile(row, (STATES, 1))
    path = tmp_path_factory.mktemp("flat") / "bundle"
    with Decoder.load(write_bundle(path, table, table), threads=1) as decoder:
        yield decoder


def answer(decoder: Decoder, k: int, prompt: list[int], **asked: object) -> list[int]:
    params = SamplingParams(**{"max_tokens": 8, **asked})  # type: ignore[arg-type]
    return list(decoder.generate(prompt, params, num_draft_tokens=k).token_ids)


@pytest.mark.parametrize("k", KS)
def test_a_repetition_loop_is_broken(flat: Decoder, k: int) -> None:
    assert answer(flat, k, [1]) == [FIRST] * 8
    for asked in ({"presence_penalty": 2.0}, {"repetition_penalty": 5.0}):
        # 2.0 off is five places back; so is 3.0 / 5.
        tokens = answer(flat, k, [1], max_tokens=5, **asked)
        assert tokens == [FIRST + i for i in range(5)]
    # Each time costs 0.6: A, B, C (2.2), then A and D stand at 2.4 and 1.8, …
    expected, counts = [], np.zeros(20)
    for _ in range(8):
        expected.append(FIRST + int((3.0 - 0.4 * np.arange(20) - 0.6 * counts).argmax()))
        counts[expected[-1] - FIRST] += 1
    assert answer(flat, k, [1], frequency_penalty=0.6) == expected
    assert len(set(expected)) > 3


@pytest.mark.parametrize("k", [0, 4])
def test_the_prompt_counts_for_repetition_alone(flat: Decoder, k: int) -> None:
    prompt = [FIRST, FIRST]
    assert answer(flat, k, prompt, repetition_penalty=1.5)[0] == SECOND
    assert answer(flat, k, prompt, presence_penalty=2.0)[:2] == [FIRST, SECOND]
    assert answer(flat, k, prompt, frequency_penalty=1.0)[:2] == [FIRST, SECOND]
    assert answer(flat, k, [1], repetition_penalty=1.5)[0] == FIRST


# Bans and bias.

LOVED = FAVOURITES[:30]


@pytest.fixture(scope="module")
def lovers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """Target and draft both love thirty tokens, the draft beyond measure."""
    target, draft = TABLE.copy(), NEAR.copy()
    target[:, LOVED] += 12.0
    draft[:, LOVED] += 40.0
    target[:, EOS] = draft[:, EOS] = -60.0
    path = tmp_path_factory.mktemp("lovers") / "bundle"
    write_bundle(path, target, draft, context=600)
    with Decoder.load(path, threads=1) as decoder:
        yield decoder


@pytest.mark.parametrize("k", [0, 2, 4])
def test_what_is_banned_never_comes_out(lovers: Decoder, k: int) -> None:
    """3 × 580 hot tokens, accepted, recovered and bonus ones."""
    banned, biased = LOVED[:15], LOVED[15:]
    params = SamplingParams(
        temperature=2.0,
        logit_bias=dict.fromkeys(biased, -100.0),
        banned_tokens=banned,
        max_tokens=580,
    )
    drawn: list[int] = []
    for seed in range(3):
        result = generate(lovers, replace(params, seed=seed), k)
        drawn += result.token_ids
        assert (result.stats.num_accepted_draft_tokens > 0) == (k > 0)
    assert len(drawn) == 3 * 580
    assert not set(drawn) & {*banned, *biased}
    free = generate(lovers, replace(params, logit_bias={}, banned_tokens=(), max_tokens=99), k)
    assert set(free.token_ids) & set(banned)
    assert set(free.token_ids) & set(biased)


# Minimum length.


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """Two models that always want to end."""
    table = TABLE.copy()
    table[:, EOS] = 40.0
    path = tmp_path_factory.mktemp("eager") / "bundle"
    with Decoder.load(write_bundle(path, table, table), threads=1) as decoder:
        yield decoder


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("minimum", [1, 2, 5, 6, 9])
def test_the_end_comes_right_behind_the_minimum(eager: Decoder, k: int, minimum: int) -> None:
    for sampling in ({}, SAMPLED):
        params = SamplingParams(min_tokens=minimum, **sampling)  # type: ignore[arg-type]
        result = generate(eager, params, k)
        assert result.finish_reason is FinishReason.EOS
        assert len(result.token_ids) == minimum + 1
        assert EOS not in result.token_ids[:-1]
    assert generate(eager, SamplingParams(), k).token_ids == (EOS,)


def test_an_end_that_was_drafted_and_rejected_does_not_end(tmp_path: Path) -> None:
    target, draft = TABLE.copy(), TABLE.copy()
    target[:, EOS], draft[:, EOS] = -50.0, 50.0
    path = write_bundle(tmp_path / "bundle", target, draft)
    with Decoder.load(path, threads=1) as decoder:
        result = generate(decoder, SamplingParams(min_tokens=8, max_tokens=30), 4)
    assert list(result.token_ids) == reference_greedy(target, PROMPT, 30)
    assert result.finish_reason is FinishReason.LENGTH
    assert 0 < result.stats.num_accepted_draft_tokens < result.stats.num_draft_tokens


def test_every_end_token_waits_for_the_minimum(tmp_path: Path) -> None:
    table = TABLE.copy()
    table[:, [9, EOS]] = [41.0, 40.0]
    path = write_bundle(tmp_path / "bundle", table, table, eos=(9, EOS))
    with Decoder.load(path, threads=1) as decoder:
        tokens = generate(decoder, SamplingParams(min_tokens=6), 4).token_ids
        assert len(tokens) == 7
        assert tokens[-1] == 9
        assert not {9, EOS} & set(tokens[:-1])
        passed = generate(decoder, SamplingParams(min_tokens=6, max_tokens=8, ignore_eos=True), 4)
        assert passed.token_ids[:6] == tokens[:6]  # it holds where the end is ignored, too
        assert passed.token_ids[6:] == (9, 9)
