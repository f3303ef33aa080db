"""Grammars: what is refused and how it says so, what may come next, and the way back."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers_grammar import ENDS, PADDING, Language, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken, Tokenizer, models

from runtime.errors import InvalidRequest
from runtime.grammar import Grammar, GrammarKind
from runtime.matcher import Matcher

SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}, "c": {"enum": ["x", "yab"]}},
    "required": ["ab"],
    "additionalProperties": False,
}
CALC = """
start: sum
sum: term (("+" | "-") term)*
term: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
"""
FORGETFUL = 'start: word /[0-9]+/ ";"\nword[max_tokens=3]: /[ab]+/'
GRAMMARS = {
    "json_schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex("(ab|a)+c?[0-9]{2,4}"),
    "lark": Grammar.lark(CALC),
    "no way back in the library": Grammar.lark(FORGETFUL),
}


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Language:
    return Language(tmp_path_factory.mktemp("language"), byte_level())


# What can be told without the library.


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Grammar.regex(""), "received ''"),
        (lambda: Grammar.lark(5), "received 5"),  # type: ignore[arg-type]
        (lambda: Grammar.regex("\ud800"), "half a character at 0"),
        (lambda: Grammar(kind="bnf", text="x"), "'bnf'.*json_schema, regex, lark"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.json_schema("[1]"), "JSON list"),
        (lambda: Grammar.json_schema("[" * 200_000), "not JSON"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "not JSON"),
        (lambda: Grammar.json_schema({"const": object()}), "not JSON"),
        (lambda: Grammar.json_schema(["a"]), r"received \['a'\]"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_grammar_is_refused_by_name(make: Callable[[], Grammar], told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^grammar: .*{told}"):
        make()


def test_a_schema_is_the_same_as_a_mapping_and_as_text() -> None:
    assert Grammar.json_schema({"type": "object"}) == Grammar.json_schema('{"type": "object"}')
    assert Grammar(kind="regex", text="a").kind is GrammarKind.REGEX  # type: ignore[arg-type]


IN_A_PROCESS = """
import pathlib, sys
import runtime.constraint, runtime.grammar_compiler
assert "llguidance" not in sys.modules
{before}
compiler = runtime.grammar_compiler.GrammarCompiler(pathlib.Path({path!r}), 300, ())
try:
    print(compiler.compile(runtime.Grammar.regex("a")).num_tokens)
except runtime.InvalidRequest as error:
    print(error)
print(sorted({{"torch", "transformers", "onnx"}} & set(sys.modules)))
"""


def in_a_process(root: Path, before: str, path: Path) -> list[str]:
    code = IN_A_PROCESS.format(before=before, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_library_is_loaded_last_and_brings_no_builder(root: Path, tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert in_a_process(root, "", tmp_path / "tokenizer.json") == ["0", "[]"]


def test_without_the_library_the_error_names_the_extra(root: Path, tmp_path: Path) -> None:
    told = in_a_process(root, "sys.modules['llguidance'] = None", tmp_path / "none")
    assert told[0].startswith("grammar: ")
    assert 'pip install "outrider[grammar]"' in told[0]


# What only the library can tell.


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar.regex("(ab"), "regex that does not compile: .*unclosed group"),
        (Grammar.regex("a(?=b)"), "look-around"),
        (Grammar.json_schema({"type": "strin"}), "json_schema that does not compile.*strin"),
        (Grammar.json_schema({"contains": {"type": "null"}}), "contains.*\n.*lenient"),
        (Grammar.json_schema({"type": "string", "format": "x"}), "Unknown format: x"),
        (Grammar.json_schema({"$ref": "http://example.org/x"}), "does not fetch"),
        (Grammar.lark("start: word"), 'lark that does not compile: .*unknown name: "word"'),
        (Grammar.lark('begin: "a"'), "start"),
        (Grammar.lark("start: " + "(" * 10_000), "too deeply nested"),
        (Grammar.regex("a{0}"), "allows no text"),
        (Grammar.json_schema({"$ref": "#"}), "allows no text"),
    ],
)
def test_what_does_not_compile_is_refused_by_name(
    language: Language, grammar: Grammar, told: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)^grammar: .*{told}") as refused:
        language.compiler.compile(grammar)
    assert len(str(refused.value)) < 1000


def test_an_ignored_keyword_is_ignored_where_the_schema_says_so(language: Language) -> None:
    schema = {"type": "null", "contains": {}, "x-guidance": {"lenient": True}}
    matcher = language.matcher(Grammar.json_schema(schema), "null")
    assert matcher.complete


def test_white_space_is_free_unless_the_schema_says_otherwise(language: Language) -> None:
    free = {"type": "array", "items": {"type": "null"}}
    tight = {**free, "x-guidance": {"whitespace_flexible": False}}
    space = language.id("Ġ")
    assert language.row(language.matcher(Grammar.json_schema(free), "["))[space]
    assert not language.row(language.matcher(Grammar.json_schema(tight), "["))[space]


def test_a_tokenizer_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, "<unk>"))
    with pytest.raises(InvalidRequest, match=r"grammar: this bundle's tokenizer.*decoder"):
        Language(tmp_path, words, ends=()).compiler.compile(Grammar.regex("a"))


def test_a_tokenizer_with_gaps_is_refused(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "c": 3}  # one more token would be another 3
    gaps = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    gaps.decoder = byte_level().decoder
    with pytest.raises(InvalidRequest, match=r"grammar: this bundle's tokenizer.*gaps"):
        Language(tmp_path, gaps, ends=()).compiler.compile(Grammar.regex("a"))


# What may come next.


def test_all_tokens_that_begin_a_continuation(language: Language) -> None:
    matcher = language.matcher(Grammar.regex("aba?"))
    assert language.allowed(matcher) == {"a", "ab", "aba"}
    matcher.advance(language.id("ab"))
    assert language.allowed(matcher) == {"a", *ENDS}
    assert not matcher.complete
    assert not matcher.dead_end
    matcher.advance(language.id("a"))
    assert language.allowed(matcher) == set(ENDS)
    assert matcher.complete


@pytest.mark.parametrize("end", ENDS)
def test_every_end_token_ends_it_and_nothing_follows(language: Language, end: str) -> None:
    matcher = language.matcher(Grammar.regex("a+"), "a")
    before = language.row(matcher)
    matcher.advance(language.id(end))
    assert matcher.complete
    assert not matcher.dead_end
    assert not language.row(matcher).any()
    for token in ("a", end):
        with pytest.raises(RuntimeError, match="behind 2 tokens"):
            matcher.advance(language.id(token))
    matcher.rollback(1)
    assert (language.row(matcher) == before).all()
    assert not matcher.complete


def test_a_banned_token_raises_and_changes_nothing(language: Language) -> None:
    matcher = language.matcher(Grammar.regex("ab+"), "a")
    before = language.row(matcher)
    for token in (language.id("a"), language.eos[0], language.vocab - 1):
        with pytest.raises(RuntimeError, match="allows no such"):
            matcher.advance(token)
    assert (language.row(matcher) == before).all()
    assert matcher.num_tokens == 1


def test_padding_is_never_allowed(language: Language) -> None:
    row = language.row(language.matcher(Grammar.regex("(?s:.*)")))
    assert row.sum() > 128  # bytes that begin a character
    assert not row[-PADDING:].any()
    assert len(row) == language.tokenizer.get_vocab_size() + PADDING


def test_a_target_that_knows_fewer_ids_than_its_tokenizer(tmp_path: Path) -> None:
    short = Language(tmp_path, byte_level(), ends=(), padding=-3)
    row = short.row(short.matcher(Grammar.regex("(?s:.+)")))
    assert len(row) == short.tokenizer.get_vocab_size() - 3
    assert row.sum() > 128


def test_a_token_that_the_target_does_not_know_leads_nowhere(tmp_path: Path) -> None:
    tokenizer = byte_level(special=(), without="b")
    tokenizer.add_tokens([AddedToken("bc", special=False)])
    short = Language(tmp_path, tokenizer, ends=(), padding=-1)
    assert short.vocab == short.id("bc")
    assert short.matcher(Grammar.regex("a(bc)?"), "a").complete
    assert short.matcher(Grammar.regex("abc|c"), "a").dead_end


def test_a_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    """No end token at all: id 0 is text like any other, and a complete grammar says so."""
    plain = Language(tmp_path, byte_level(special=()), ends=(), padding=0)
    first = plain.tokenizer.id_to_token(0)
    matcher = plain.matcher(Grammar.regex(f"a{first}?"), "a")
    assert plain.allowed(matcher) == {first}
    matcher.advance(0)
    assert matcher.complete
    assert plain.allowed(matcher) == set()


def test_an_end_token_that_text_can_spell_is_no_text(tmp_path: Path) -> None:
    tokenizer = byte_level(special=("<end>",))
    tokenizer.add_tokens([AddedToken("ba", special=False)])
    spelled = Language(tmp_path, tokenizer, ends=("<end>", "ba"))
    matcher = spelled.matcher(Grammar.regex("(ba)+"))
    assert spelled.allowed(matcher) == {"b"}
    for token in "ba":
        matcher.advance(spelled.id(token))
    assert spelled.allowed(matcher) == {"b", "<end>", "ba"}
    matcher.advance(spelled.id("ba"))
    assert matcher.complete


def test_a_grammar_that_only_an_end_token_could_go_on_is_complete(tmp_path: Path) -> None:
    tokenizer = byte_level(special=(), without="b")
    tokenizer.add_tokens([AddedToken("bc", special=False)])
    spelled = Language(tmp_path, tokenizer, ends=("bc",))
    matcher = spelled.matcher(Grammar.regex("a(bc)*"), "a")
    assert spelled.allowed(matcher) == {"bc"}
    assert matcher.complete


def test_a_dead_end_is_told_from_an_end_and_can_be_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No token spells a b, so behind the a of `ab` nothing may come."""
    mute = Language(tmp_path, byte_level(without="b"))
    matcher = mute.matcher(Grammar.regex("ab|ac|c"))
    start = mute.row(matcher)
    matcher.rollback(0)
    with caplog.at_level(logging.WARNING):
        dead = mute.matcher(Grammar.regex("xab|xc"), "xa")
        assert dead.dead_end
    assert not dead.complete
    assert not mute.row(dead).any()
    assert caplog.text == ""  # the user's grammar, no fault of ours
    with pytest.raises(RuntimeError, match="allows no such"):
        dead.advance(mute.id("c"))
    dead.rollback(1)
    assert mute.allowed(dead) == {"a", "c"}
    dead.advance(mute.id("c"))
    assert dead.complete
    assert mute.allowed(matcher) == {"a", "c"}
    assert (mute.row(matcher) == start).all()


@pytest.mark.parametrize("rest", ["", "d", "(d|e)+", "a+"])
def test_a_forced_byte_that_no_token_spells_is_a_dead_end(tmp_path: Path, rest: str) -> None:
    """Whatever the grammar has behind it: the library's mask alone would go on there."""
    mute = Language(tmp_path, byte_level(without="b"))
    matcher = mute.matcher(Grammar.regex(f"xc|xab{rest}"), "xa")
    assert matcher.dead_end
    assert not mute.row(matcher).any()


@pytest.mark.parametrize("limit", [{"step_max_items": 100}, {"max_items_in_row": 20}])
def test_a_text_too_complex_to_follow_is_a_dead_end_with_a_warning(
    language: Language, limit: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """The library gives up in a mask or in reading a token that it allowed; limits make it soon."""
    tokenizer = language.tokenizer
    library = LLTokenizer(tokenizer.to_str(), language.vocab, language.eos[0])
    grammar = LLMatcher.grammar_from_lark('start: s\ns: s s | "a"')
    start = LLMatcher(library, grammar, log_level=0, limits=LLParserLimits(**limit))
    every = np.full(-(-language.vocab // 32), -1, np.int32)
    matcher = Matcher(start, every, language.eos)
    rows = []
    with caplog.at_level(logging.WARNING):
        while not matcher.dead_end:
            rows.append(language.row(matcher))
            matcher.advance(language.id("a"))
    assert 1 < matcher.num_tokens < 100
    assert "Too many items" in caplog.text or "Current row has" in caplog.text
    with pytest.raises(RuntimeError, match="allows no such"):
        matcher.advance(language.id("a"))
    for row in reversed(rows):
        matcher.rollback(1)
        assert (language.row(matcher) == row).all()


# The way back.


def walk(language: Language, matcher: Matcher, choices: list[int]) -> list[int]:
    """Read a token for each choice among those allowed, as long as there are any."""
    tokens: list[int] = []
    for choice in choices:
        allowed = np.flatnonzero(language.row(matcher))
        if not len(allowed):
            break
        tokens.append(int(allowed[choice % len(allowed)]))
        matcher.advance(tokens[-1])
    return tokens


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=25, deadline=None)
@given(
    choices=st.lists(st.integers(0, 10_000), max_size=12),
    others=st.lists(st.integers(0, 10_000), max_size=6),
    back=st.integers(0, 12),
)
def test_rollback_then_replay_equals_a_clean_run(
    language: Language, name: str, choices: list[int], others: list[int], back: int
) -> None:
    matcher = language.matcher(GRAMMARS[name])
    tokens = walk(language, matcher, choices)
    kept = tokens[: max(0, len(tokens) - back)]
    matcher.rollback(len(tokens) - len(kept))
    clean = language.matcher(GRAMMARS[name])
    for token in kept:
        clean.advance(token)  # without a look at any mask on the way
    assert matcher.num_tokens == len(kept)
    assert (language.row(matcher) == language.row(clean)).all()
    assert walk(language, matcher, others) == walk(language, clean, others)
    assert (matcher.complete, matcher.dead_end) == (clean.complete, clean.dead_end)


def test_no_more_is_forgotten_than_was_read(language: Language) -> None:
    matcher = language.matcher(Grammar.regex("a+"), "a")
    for tokens in (2, -1):
        with pytest.raises(RuntimeError, match="rollback"):
            matcher.rollback(tokens)


def test_matchers_of_one_grammar_are_apart(language: Language) -> None:
    one, other = (language.matcher(GRAMMARS["lark"]) for _ in range(2))
    before = language.row(other)
    walk(language, one, [3, 1, 4, 1, 5])
    assert (language.row(other) == before).all()


@pytest.mark.model
def test_the_example_model_s_tokens(example_gguf: Path, tmp_path: Path) -> None:
    """Texts that obey, in the tokens of a real vocabulary, are allowed token by token."""
    from export.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(example_gguf)
    special = checkpoint.special_tokens().eos_token_ids
    tokenizer = checkpoint.text_files().tokenizer
    ends = [tokenizer.id_to_token(i) for i in special]
    real = Language(tmp_path, tokenizer, ends=ends, padding=0)
    assert len(real.eos) > 1
    texts = {"json_schema": '{"ab": 1234, "c": "yab"}', "regex": "abac2024", "lark": "(12+3)-456"}
    for name, text in texts.items():
        matcher = real.matcher(GRAMMARS[name])
        for token in real.ids(text):
            assert real.row(matcher)[token], (name, token)
            matcher.advance(token)
        assert real.row(matcher)[list(real.eos)].all(), name
        assert not real.row(matcher)[0] or 0 in real.eos
