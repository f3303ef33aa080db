"""Grammars through whole requests: texts obey, drafting goes on, why they end, nothing stays."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_decode import (
    KS,
    NEAR,
    SAMPLED,
    TABLE,
    came_out,
    generate,
    oracle,
    params_of,
)
from helpers_runtime import (
    EOS,
    VOCAB,
    byte_tokenizer,
    write_bundle,
)

from runtime import Decoder, Grammar, SamplingParams
from runtime.grammar_compiler import GrammarCompiler
from runtime.sequence import FinishReason

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
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path = tmp_path_factory.mktemp("compiler") / "tokenizer.json"
    byte_tokenizer(VOCAB).save(str(path))
    return GrammarCompiler(path, VOCAB, (EOS,))


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
