"""What sampling, grammars and the command line refuse: each names its field, and nothing is lost.

Every refusal is followed by a request that must give what it gave before.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers_runtime import EOS, VOCAB, near_table, target_table, write_bundle
from typer.testing import CliRunner

from runtime import Decoder, Grammar, InvalidRequest, SamplingParams
from runtime.cli import app

TABLE = target_table(VOCAB)
NAN, INF = float("nan"), float("inf")
NUMBERS = {
    "temperature": (NAN, INF, -INF, -1e-9, 1e39, 10**400, "1", None, True, [1.0]),
    "top_p": (NAN, INF, 0, 0.0, -0.5, 1.0001, 2, "1", None, True),
    "min_p": (NAN, -INF, -0.1, 1.1, "0", None, True),
    "repetition_penalty": (NAN, INF, 0, 0.0, -1.0, 1e-5, 1e-300, 1e5, 10**400, "1", None, True),
    "presence_penalty": (NAN, INF, -2.01, 2.01, 10**400, "1", None, True),
    "frequency_penalty": (NAN, -INF, -2.01, 2.01, "1", None, True),
    "top_k": (NAN, -1, 1.0, "1", None, True),
    "min_tokens": (NAN, -1, 1.0, "1", None, True),
    "max_tokens": (NAN, 0, -1, 1.0, "1", True),
    "seed": (NAN, -1, 2**64, 1.0, "1", True),
    "logit_bias": (
        None, 5, "ab", [1], {1: NAN}, {1: INF}, {1: 100.5}, {1: "2"}, {1: None}, {1: True},
        {-1: 1.0}, {1.5: 1.0}, {"a": 1.0}, {True: 1.0},
    ),
    "banned_tokens": (None, 5, "ab", b"a", [1.5], [-1], [True], [NAN], ["a"], [[1]]),
    "grammar": ("a+", 5, {"type": "object"}, Grammar),
    "stop": (None, 5, "", b"x", ("a", ""), (1,)),
    "ignore_eos": (None, 1, "yes", NAN),
}  # fmt: skip
WIDE = {
    "repetition_penalty": (1e-4, 1e4),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2.0, 2),
    "logit_bias": ({}, {0: -100, VOCAB - 1: 100.0}, {np.int64(3): 1}),
    "banned_tokens": ((), [np.int64(4), 4], {5}, range(200)),
    "top_p": (1, 1e-300, 5e-324),
    "min_p": (0, 1, 1e-300),
    "top_k": (0, 2**70),
    "temperature": (0, 5e-324, 1e-44, 3.4e38),
    "min_tokens": (0, 6),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("refusals") / "bundle"
    return write_bundle(path, TABLE, near_table(TABLE, 0.5))


@pytest.fixture(scope="module")
def loaded(bundle: Path) -> Iterator[Decoder]:
    with Decoder.load(bundle, threads=1) as decoder:
        yield decoder


@pytest.fixture
def decoder(loaded: Decoder) -> Iterator[Decoder]:
    """One that gives the same answer after the test as before."""
    params = SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=4, max_tokens=20)
    before = loaded.generate([1, 2], params, num_draft_tokens=3).token_ids
    yield loaded
    assert loaded.generate([1, 2], params, num_draft_tokens=3).token_ids == before


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in NUMBERS.items() for value in values]
)
def test_values_out_of_range_name_their_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: received .*\. Expected "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WIDE.items() for value in values]
)
def test_values_at_the_edge_of_their_range_decode(
    decoder: Decoder, field: str, value: object
) -> None:
    """And the tokens come from a law: none is not a number, which would give token 0 for ever."""
    for k in (0, 3):
        asked = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True, field: value}
        tokens = decoder.generate([1, 2], SamplingParams(**asked), num_draft_tokens=k).token_ids
        assert len(tokens) == 6
        assert set(tokens) != {0}


def test_a_minimum_beyond_the_maximum() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens: received 5.*max_tokens, 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("token", [VOCAB, 2**70])
def test_unknown_tokens_are_refused_with_the_size_of_the_vocabulary(
    decoder: Decoder, token: int
) -> None:
    for asked in ({"logit_bias": {token: 1.0}}, {"banned_tokens": (3, token)}):
        params = SamplingParams(**asked)  # type: ignore[arg-type]
        told = rf"{next(iter(asked))}: received token {token}.*0 to {VOCAB - 1}"
        with pytest.raises(InvalidRequest, match=told):
            decoder.stream([1], params)  # at once, before it is consumed


ALL_BUT_END = tuple(t for t in range(VOCAB) if t != EOS)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(banned_tokens=tuple(range(VOCAB))),
        SamplingParams(banned_tokens=ALL_BUT_END, min_tokens=1),
        SamplingParams(banned_tokens=ALL_BUT_END, grammar=Grammar.regex("a+")),
        SamplingParams(banned_tokens=ALL_BUT_END, grammar=Grammar.regex("a*"), min_tokens=1),
    ],
    ids=["all banned", "an end too early", "a grammar's all", "all three"],
)
@pytest.mark.parametrize("k", [0, 3])
def test_a_request_that_allows_no_token(decoder: Decoder, params: SamplingParams, k: int) -> None:
    with pytest.raises(InvalidRequest, match=r"banned_tokens.*allow no first token"):
        decoder.generate([1], params, num_draft_tokens=k)


def test_where_only_the_end_is_left_it_ends(decoder: Decoder) -> None:
    for grammar in (None, Grammar.regex("a*")):
        params = SamplingParams(banned_tokens=ALL_BUT_END, grammar=grammar)
        assert decoder.generate([1], params).token_ids == (EOS,)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Grammar.regex("(ab"), "regex.*unclosed group.*Expected a regular expression"),
        (lambda: Grammar.json_schema({"type": "strin"}), "json_schema.*strin"),
        (lambda: Grammar.json_schema({"contains": {}}), "contains.*Expected a schema within"),
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.lark("start: word"), "lark.*word"),
        (lambda: Grammar.regex("a{0}"), "allows no text"),
    ],
)
def test_grammars_that_are_none(decoder: Decoder, make: Callable[[], Grammar], told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)^grammar: .*{told}"):
        decoder.stream([1], SamplingParams(grammar=make()))


# The command line.


def run(bundle: Path, *arguments: object) -> tuple[int, str, str]:
    command = ["generate", str(bundle), "--prompt", "ab", "--max-tokens", "4"]
    done = CliRunner().invoke(app, command + [str(a) for a in arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--logit-bias", "x"], "--logit-bias: received 'x'. Expected ID=BIAS"),
        (["--logit-bias", "5"], "--logit-bias: received '5'"),
        (["--logit-bias", "5=nan"], "logit_bias: received nan"),
        (["--logit-bias", "5=101"], "logit_bias: received 101"),
        (["--logit-bias", f"{VOCAB}=1"], f"logit_bias: received token {VOCAB}"),
        (["--logit-bias", "-1=1"], "logit_bias: received -1"),
        (["--ban", VOCAB], f"banned_tokens: received token {VOCAB}"),
        (["--ban", "-1"], "banned_tokens: received -1"),
        (["--min-tokens", "-1"], "min_tokens: received -1"),
        (["--min-tokens", "5"], "min_tokens: received 5. Expected at most max_tokens"),
        (["--repetition-penalty", "0"], "repetition_penalty: received 0"),
        (["--presence-penalty", "nan"], "presence_penalty: received nan"),
        (["--frequency-penalty", "3"], "frequency_penalty: received 3"),
        (["--regex", ""], "grammar: received ''"),
        (["--regex", "(ab"], "grammar: received a regex that does not compile"),
        (["--json-schema", "none.json"], "--json-schema none.json"),
        (["--lark", "none.lark"], "--lark none.lark"),
    ],
)
def test_the_command_line_says_what_is_wrong_and_exits_with_1(
    bundle: Path, arguments: list[object], told: str
) -> None:
    code, out, err = run(bundle, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert told in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--regex", "a", "--lark", "x"],
        ["--json-schema", "x", "--regex", "a"],
        ["--ban", "x"],
        ["--min-tokens", "1.5"],
        ["--presence-penalty", "much"],
    ],
)
def test_usage_errors_exit_with_2(bundle: Path, arguments: list[object]) -> None:
    assert run(bundle, *arguments)[0] == 2


@pytest.mark.parametrize("content", [b"\xff{}", b"{", b"[]", b""])
def test_files_that_hold_no_schema(bundle: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "schema.json"
    path.write_bytes(content)
    code, _, err = run(bundle, "--json-schema", path)
    assert code == 1
    assert "--json-schema" in err or err.startswith("error: grammar: ")


def test_options_reach_the_graphs(bundle: Path, tmp_path: Path) -> None:
    """Each by what it does to the text."""
    plain = run(bundle)[1]
    schema, lark = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text('{"enum": ["abc"]}')
    lark.write_text('start: "xy"')
    assert run(bundle, "--regex", "[0-9]{3}")[1].strip().isdigit()
    assert run(bundle, "--lark", lark)[1] == "xy\n"
    assert run(bundle, "--json-schema", schema)[1].startswith('"abc')
    with Decoder.load(bundle, threads=1) as decoder:
        first = decoder.generate("ab", SamplingParams(max_tokens=1)).token_ids[0]
        letter = decoder.encode("q")[0]
    assert run(bundle, "--ban", first)[1] != plain
    assert run(bundle, "--logit-bias", f"{first}=-100")[1] != plain
    assert run(bundle, "--logit-bias", f"{letter}=100")[1] == "qqqq\n"
    assert run(bundle, "--logit-bias", f"{EOS}=100")[1] == "\n"
    assert run(bundle, "--logit-bias", f"{EOS}=100", "--min-tokens", 3)[1] != "\n"
    few = [x for i in range(20, VOCAB) for x in ("--ban", i)]  # so that the rest comes again
    texts = [run(bundle, "--max-tokens", 40, *few)[1]]
    for option in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        texts.append(run(bundle, "--max-tokens", 40, *few, option, 2)[1])
    assert len(set(texts)) == 4


WITHOUT_THE_LIBRARY = """
import sys
sys.modules["llguidance"] = None  # importing it raises
from runtime.cli import app
sys.argv[0] = "runtime"
app()
"""


def test_without_the_library_only_grammars_are_refused(bundle: Path, root: Path) -> None:
    def told(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", WITHOUT_THE_LIBRARY, "generate", str(bundle)]
        command += ["--prompt", "ab", "--max-tokens", "2", *arguments]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, out, err = told("--regex", "a+")
    assert (code, out) == (1, "")
    assert err.startswith("error: grammar: ")
    assert 'pip install "outrider[grammar]"' in err
    assert told("--ban", "5")[0] == 0
