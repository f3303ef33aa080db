"""Penalties, bias, bans, minimum length and grammars through whole requests on real sessions.

An oracle written from the definitions says which tokens must come out, token for token; the rest
are the properties that users count on, and what a request leaves behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_decode import Mask, Oracle
from helpers_runtime import (
    EOS,
    STATES,
    VOCAB,
    byte_tokenizer,
    near_table,
    reference_greedy,
    target_table,
    write_bundle,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import Decoder, Grammar, InvalidRequest, SamplingParams
from runtime.decoder import Result
from runtime.grammar_compiler import GrammarCompiler
from runtime.sampling_inputs import SamplingInputs
from runtime.sequence import FinishReason

KS = (0, 1, 2, 3, 4)
TOKENS = 24
PROMPT = (70, 71, 71, 101, 3)
TABLE = target_table(VOCAB)
TABLE[:, EOS] = TABLE.max(1) - 1.0  # the end is always likely, so that it must be kept away
NEAR = near_table(TABLE, 0.6)
FAVOURITES = tuple(int(t) for t in np.argsort(-TABLE.mean(0))[:40])

ASKED = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.8},
    "frequency": {"frequency_penalty": -1.5},
    "bias": {"logit_bias": dict.fromkeys(FAVOURITES[:6], 4.0) | {EOS: -100.0}},
    "bans": {"banned_tokens": (*FAVOURITES, EOS)},
    "min_tokens": {"min_tokens": 11, "logit_bias": {EOS: 2.0}},
    "together": {
        "repetition_penalty": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": {FAVOURITES[0]: 5.0, FAVOURITES[1]: 3.0},
        "banned_tokens": FAVOURITES[2:9],
        "min_tokens": 7,
    },
}
SAMPLED = {"temperature": 0.9, "top_p": 0.97, "top_k": 60, "seed": 11}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "abc", "x"]},
        "n": {"type": "integer", "minimum": -20, "maximum": 999},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = r"(ab|a[0-9]){2,5}(-[xyz]{1,3})?"
LARK = 'start: item ("," item)*\nitem: /[ab]{1,2}/ | "(" start ")"'


def obeys_schema(text: str) -> bool:
    value = json.loads(text)
    fits = set(value) == {"name", "n", "ok"} and value["name"] in ("ab", "abc", "x")
    return fits and isinstance(value["ok"], bool) and -20 <= value["n"] <= 999


def obeys_lark(text: str) -> bool:
    """The inmost brackets are a list of items each, and may then stand for an item."""
    items = r"(?:[ab]{1,2}|I)(?:,(?:[ab]{1,2}|I))*"
    while (shorter := re.sub(rf"\({items}\)", "I", text)) != text:
        text = shorter
    return re.fullmatch(items, text) is not None


GRAMMARS = {
    "json_schema": (Grammar.json_schema(SCHEMA), obeys_schema),
    "regex": (Grammar.regex(PATTERN), lambda text: bool(re.fullmatch(PATTERN, text))),
    "lark": (Grammar.lark(LARK), obeys_lark),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft near its target."""
    return write_bundle(tmp_path_factory.mktemp("near") / "bundle", TABLE, NEAR)


@pytest.fixture(scope="module")
def decoder(bundle: Path) -> Iterator[Decoder]:
    with Decoder.load(bundle, threads=1) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """A draft that is its target."""
    path = tmp_path_factory.mktemp("twin") / "bundle"
    with Decoder.load(write_bundle(path, TABLE, TABLE), threads=1) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path = tmp_path_factory.mktemp("compiler") / "tokenizer.json"
    byte_tokenizer(VOCAB).save(str(path))
    return GrammarCompiler(path, VOCAB, (EOS,))


def params_of(name: str, **others: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, **ASKED[name], **others})  # type: ignore[arg-type]


def oracle(
    params: SamplingParams,
    *,
    target: np.ndarray = TABLE,
    draft: np.ndarray = NEAR,
    prompt: tuple[int, ...] = PROMPT,
    target_ids: np.ndarray | None = None,
    compiler: GrammarCompiler | None = None,
) -> Oracle:
    mask = Mask(params=params, vocab=target.shape[1], compiler=compiler)
    return Oracle(
        target=target, draft=draft, prompt=prompt, params=params, mask=mask, target_ids=target_ids
    )


def generate(decoder: Decoder, params: SamplingParams, k: int) -> Result:
    return decoder.generate(list(PROMPT), params, num_draft_tokens=k)


def came_out(result: Result) -> tuple[list[int], FinishReason]:
    return list(result.token_ids), result.finish_reason


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
    generate(decoder, SamplingParams(grammar=GRAMMARS["regex"][0], max_tokens=9), 2)
    with closing(decoder.stream([1, 2], params_of("bans"), num_draft_tokens=4)) as cancelled:
        next(cancelled)
        next(cancelled)
    with pytest.raises(InvalidRequest):
        decoder.generate([1], SamplingParams(banned_tokens=tuple(range(VOCAB))))
    assert generate(decoder, params, k).token_ids == before


# What a request leaves behind.


def tables(decoder: Decoder) -> dict[str, np.ndarray]:
    return {n: v.copy() for n, v in decoder._open_rounds().buffers.sampling.shared.items()}


def check_tables(decoder: Decoder, params: SamplingParams, tokens: tuple[int, ...]) -> None:
    """As if the tokens had been committed one by one by a decoder that never drafted."""
    clean = SamplingInputs(VOCAB, 5)
    clean.begin(params, PROMPT)
    clean.commit(tokens)
    for name, value in tables(decoder).items():
        np.testing.assert_array_equal(value, clean.shared[name], name)
    assert clean.shared["output_counts"].sum() == len(tokens)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_round_cut_by_a_limit_counts_what_was_kept(twin: Decoder, max_tokens: int) -> None:
    params = params_of("together", max_tokens=max_tokens, min_tokens=0, ignore_eos=True)
    result = generate(twin, params, 4)
    assert len(result.token_ids) == max_tokens
    check_tables(twin, params, result.token_ids)


def test_a_round_cut_by_an_end_token_counts_what_was_kept(twin: Decoder) -> None:
    """The draft goes on behind the end; nothing of that is counted."""
    cut_within = 0
    for minimum in range(1, 12):
        params = params_of("repetition", min_tokens=minimum, logit_bias={EOS: 30.0})
        result = generate(twin, params, 4)
        assert result.finish_reason is FinishReason.EOS
        assert len(result.token_ids) == minimum + 1
        check_tables(twin, params, result.token_ids)
        cut_within += (minimum + 1 - 1) % 5 != 0
    assert cut_within > 5


def test_a_round_cut_by_a_stop_string_counts_what_was_kept(twin: Decoder) -> None:
    params = params_of("together", min_tokens=0, ignore_eos=True)
    whole = generate(twin, params, 4)
    letters = [twin.decode([t]) for t in whole.token_ids]
    readable = [i for i, c in enumerate(letters) if c.isascii() and c and letters.index(c) == i]
    assert len(readable) > 3
    for at in readable:
        stopped = replace(params, stop=(letters[at],))
        result = generate(twin, stopped, 4)
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids == whole.token_ids[: at + 1]
        check_tables(twin, stopped, result.token_ids)


def test_a_cancelled_round_counts_what_came_out(decoder: Decoder) -> None:
    params = params_of("together")
    with closing(decoder.stream(list(PROMPT), params, num_draft_tokens=4)) as stream:
        tokens = [t for _ in range(3) for t in next(stream).token_ids]
    check_tables(decoder, params, tuple(tokens))


@pytest.mark.parametrize("ended", ["finished", "cancelled", "refused"])
def test_nothing_is_left_for_a_request_that_asks_for_nothing(decoder: Decoder, ended: str) -> None:
    grammar = GRAMMARS["json_schema"][0]
    params = params_of("together", grammar=grammar, banned_tokens=(1,), max_tokens=15)
    with closing(decoder.stream(list(PROMPT), params, num_draft_tokens=4)) as stream:
        next(stream)
        if ended == "finished":
            list(stream)
    if ended == "refused":
        refused = replace(params, banned_tokens=tuple(range(VOCAB)), grammar=None)
        with pytest.raises(InvalidRequest):
            generate(decoder, refused, 4)
    assert generate(decoder, SamplingParams(max_tokens=3), 4).token_ids
    sampling, neutral = decoder._open_rounds().buffers.sampling, SamplingInputs(VOCAB, 5)
    for name, value in sampling.shared.items():
        np.testing.assert_array_equal(value, neutral.shared[name], name)
    assert sampling.allowed.all()


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


@pytest.mark.parametrize("k", [0, 2, 4])
def test_what_is_banned_never_comes_out(tmp_path: Path, k: int) -> None:
    """Target and draft both love it: 3 × 980 tokens, hot, behind 2,940 masks of their own."""
    banned, biased = FAVOURITES[:15], FAVOURITES[15:30]
    target, draft = TABLE.copy(), NEAR.copy()
    for table, love in ((target, 12.0), (draft, 40.0)):
        table[:, [*banned, *biased]] += love
    target[:, EOS] = draft[:, EOS] = -60.0
    path = write_bundle(tmp_path / "bundle", target, draft, context=1000)
    params = SamplingParams(
        temperature=2.0,
        logit_bias=dict.fromkeys(biased, -100.0),
        banned_tokens=banned,
        max_tokens=980,
    )
    drawn: list[int] = []
    with Decoder.load(path, threads=1) as decoder:
        for seed in range(3):
            result = generate(decoder, replace(params, seed=seed), k)
            drawn += result.token_ids
            assert (result.stats.num_accepted_draft_tokens > 0) == (k > 0)
        free = generate(decoder, replace(params, logit_bias={}, banned_tokens=(), seed=0), k)
    assert len(drawn) == 3 * 980
    assert not set(drawn) & {*banned, *biased}
    assert set(free.token_ids) & set(banned)
    assert set(free.token_ids) & set(biased)


# Minimum length.


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("minimum", [1, 2, 5, 6, 9])
def test_the_end_comes_right_behind_the_minimum(tmp_path: Path, k: int, minimum: int) -> None:
    """Of two models that always want to end."""
    eager = TABLE.copy()
    eager[:, EOS] = 40.0
    path = write_bundle(tmp_path / "bundle", eager, eager)
    with Decoder.load(path, threads=1) as decoder:
        for sampling in ({}, SAMPLED):
            params = SamplingParams(min_tokens=minimum, **sampling)  # type: ignore[arg-type]
            result = generate(decoder, params, k)
            assert result.finish_reason is FinishReason.EOS
            assert len(result.token_ids) == minimum + 1
            assert EOS not in result.token_ids[:-1]
        assert generate(decoder, SamplingParams(), k).token_ids == (EOS,)


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
        assert passed.token_ids == (9,) * 8  # no end is an end


# Grammars.


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_every_text_obeys_its_grammar(
    decoder: Decoder, compiler: GrammarCompiler, name: str, k: int
) -> None:
    grammar, obeys = GRAMMARS[name]
    reasons, accepted, drafted = set(), 0, 0
    for seed in range(8):
        temperature = 0.0 if seed == 0 else 1.2
        params = SamplingParams(
            temperature=temperature, grammar=grammar, max_tokens=70, seed=seed, top_p=0.98
        )
        result = generate(decoder, params, k)
        if result.finish_reason is not FinishReason.LENGTH:
            assert obeys(result.text), result.text
        reasons.add(result.finish_reason)
        accepted += result.stats.num_accepted_draft_tokens
        drafted += result.stats.num_draft_tokens
        if seed < 3:
            assert came_out(result) == oracle(params, compiler=compiler).decode(k)
    ends = FinishReason.GRAMMAR if name == "json_schema" else FinishReason.EOS
    assert ends in reasons
    if k:
        assert accepted > 0.2 * drafted > 0


@pytest.mark.parametrize("k", KS)
def test_penalties_bias_and_a_grammar_together(
    decoder: Decoder, compiler: GrammarCompiler, k: int
) -> None:
    grammar = GRAMMARS["lark"][0]
    for sampling in ({}, SAMPLED):
        params = params_of("together", grammar=grammar, min_tokens=9, max_tokens=20, **sampling)
        result = generate(decoder, params, k)
        assert came_out(result) == oracle(params, compiler=compiler).decode(k)
        assert len(result.token_ids) > 9


@pytest.mark.parametrize("k", KS)
def test_a_grammar_complete_at_the_last_token_is_complete(decoder: Decoder, k: int) -> None:
    grammar = Grammar.regex("[ab]{7}")
    for max_tokens, reason in ((6, "length"), (7, "grammar"), (8, "grammar"), (None, "grammar")):
        result = generate(decoder, SamplingParams(grammar=grammar, max_tokens=max_tokens), k)
        assert result.finish_reason == reason == result.stats.finish_reason
        assert len(result.text) == len(result.token_ids) == min(max_tokens or 7, 7)


@pytest.mark.parametrize("k", KS)
def test_a_grammar_that_may_go_on_ends_by_an_end_token(twin: Decoder, k: int) -> None:
    params = SamplingParams(grammar=Grammar.regex("[a-c]{3,}"), logit_bias={EOS: 60.0})
    result = generate(twin, params, k)
    assert result.finish_reason is FinishReason.EOS
    assert re.fullmatch("[a-c]{3}", result.text)
    assert result.token_ids[-1] == EOS


@pytest.mark.parametrize("k", KS)
def test_a_dead_end_has_its_own_reason(twin: Decoder, k: int) -> None:
    """Behind `aab` only b and c may follow, and both are banned."""
    b, c = twin.encode("b")[0], twin.encode("c")[0]
    grammar = Grammar.regex("aa(x[bc]|y[bc])")
    params = SamplingParams(grammar=grammar, banned_tokens=(b, c))
    result = generate(twin, params, k)
    assert result.finish_reason is FinishReason.DEAD_END
    assert result.text in ("aax", "aay")
    late = generate(twin, replace(params, max_tokens=3), k)
    assert late.finish_reason is FinishReason.LENGTH  # a limit came as soon
    again = generate(twin, replace(params, banned_tokens=()), k)
    assert again.finish_reason is FinishReason.GRAMMAR


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_cancelled_grammar_leaves_nothing(decoder: Decoder, name: str) -> None:
    grammar, obeys = GRAMMARS[name]
    params = SamplingParams(grammar=grammar, max_tokens=80, **SAMPLED)  # type: ignore[arg-type]
    before = generate(decoder, params, 3)
    for rounds in (1, 2, 3):
        with closing(decoder.stream([9], params, num_draft_tokens=4)) as stream:
            for _ in range(rounds):
                next(stream, None)
        assert generate(decoder, params, 3).token_ids == before.token_ids
    assert obeys(before.text)


def test_a_trimmed_draft_that_can_t_spell_the_grammar(
    tmp_path: Path, compiler: GrammarCompiler
) -> None:
    """It knows no digit: it stops drafting there, and the target goes on alone."""
    digits = {compiler_id(compiler, c) for c in "0123456789"}
    ids = np.array([i for i in range(VOCAB) if i not in digits])
    draft = np.ascontiguousarray(NEAR[:, ids])
    path = write_bundle(tmp_path / "bundle", TABLE, draft, d2t=ids - np.arange(len(ids)))
    grammar = Grammar.regex("([ab][0-9]){6}[xy]{6}")
    with Decoder.load(path, threads=1) as decoder:
        for sampling in ({}, SAMPLED):
            params = SamplingParams(grammar=grammar, max_tokens=40, **sampling)  # type: ignore[arg-type]
            result = generate(decoder, params, 4)
            assert re.fullmatch("([ab][0-9]){6}[xy]{6}", result.text)
            wanted = oracle(params, draft=draft, target_ids=ids, compiler=compiler)
            assert came_out(result) == wanted.decode(4)
            assert result.stats.num_accepted_draft_tokens > 3


def compiler_id(compiler: GrammarCompiler, text: str) -> int:
    matcher = compiler.compile(Grammar.regex(re.escape(text)))
    row = np.ones(VOCAB, np.bool_)
    matcher.allow(row)
    (token,) = np.flatnonzero(row)
    return int(token)
