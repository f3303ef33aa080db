"""`python -m runtime`: results on stdout, all else on stderr, one line for an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_runtime import EOS, VOCAB, near_table, target_table, write_bundle
from typer.testing import CliRunner

from runtime.cli import app

RUNNER = CliRunner()
WITHOUT_BUILDERS = """
import sys
for name in ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors"):
    sys.modules[name] = None  # importing it raises
import runtime
assert "numpy" not in sys.modules, "import runtime is to be quick"
from runtime import Decoder, SamplingParams
decoder = Decoder.load(sys.argv[1])
params = SamplingParams(temperature=0.7, seed=1, max_tokens=20)
for chunk in decoder.stream([{"role": "user", "content": "hi"}], params):
    pass
assert chunk.finish_reason == "length"
import runtime.cli
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = target_table(VOCAB)
    table[:, EOS] = -50.0
    table[:, 94:] = -50.0  # printable bytes only
    return write_bundle(tmp_path_factory.mktemp("cli") / "bundle", table, near_table(table, 0.5))


def run(*arguments: object, input: str | None = None):
    return RUNNER.invoke(app, [str(a) for a in arguments], input=input)


def test_text_is_streamed_and_stats_go_to_stderr(bundle: Path) -> None:
    result = run("generate", bundle, "--prompt", "ab", "--max-tokens", 12, "--stats")
    assert result.exit_code == 0
    assert len(result.stdout) == 13  # and the newline
    assert "12 tokens (length)" in result.stderr
    piped = run("generate", bundle, "--prompt", "-", "--max-tokens", 12, input="ab")
    assert piped.stdout == result.stdout


def test_json_is_the_last_line(bundle: Path) -> None:
    result = run(
        "generate", bundle, "--prompt", "ab", "--max-tokens", 9, "--json", "-k", 2,
        "--temperature", 0.9, "--top-k", 40, "--top-p", 0.9, "--min-p", 0.01, "--seed", 3,
    )  # fmt: skip
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["seed"] == 3
    assert record["finish_reason"] == "length"
    assert len(record["token_ids"]) == 9
    assert record["stats"]["num_draft_tokens"] > 0


def test_speculation_can_be_left_out(bundle: Path) -> None:
    arguments = ("generate", bundle, "--prompt", "ab", "--max-tokens", 20, "--json")
    plain, spec = (json.loads(run(*arguments, *k).stdout) for k in (["--no-speculation"], []))
    assert plain["text"] == spec["text"]
    assert plain["stats"]["num_spec_steps"] == 0 < spec["stats"]["num_spec_steps"]


def test_a_stop_string_and_messages(bundle: Path, tmp_path: Path) -> None:
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "hi"}]))
    arguments = ("generate", bundle, "--messages", messages, "--max-tokens", 20)
    text = run(*arguments).stdout
    stopped = run(*arguments, "--stop", text[4:6]).stdout
    assert stopped == text[: text.index(text[4:6])] + "\n"
    messages.write_text("{}")
    assert "expected a list" in run(*arguments).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "-k", "5"], "-k 5"),
        (["--prompt", ""], "prompt: received no tokens"),
        (["--messages", "none.json"], "none.json"),
    ],
)
def test_an_error_is_one_line(bundle: Path, arguments: list[str], message: str) -> None:
    result = run("generate", bundle, *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_bundle_is_an_error(tmp_path: Path) -> None:
    result = run("generate", tmp_path / "none", "--prompt", "a")
    assert result.exit_code == 1
    assert "no such directory" in result.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["--prompt", "a", "--messages", "b"], ["--prompt", "a", "--bogus"],
                  ["--prompt", "a", "-k", "2", "--no-speculation"]],
)  # fmt: skip
def test_usage_errors_exit_with_2(bundle: Path, arguments: list[str]) -> None:
    assert run("generate", bundle, *arguments).exit_code == 2


@pytest.mark.parametrize("command", [[], ["generate"], ["bench"]])
def test_help_ends_with_an_example(command: list[str]) -> None:
    text = run(*command, "--help").stdout
    assert "python -m runtime" in text[text.index("Example") :]


def test_it_runs_where_nothing_that_builds_can_be_imported(bundle: Path, root: Path) -> None:
    subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_BUILDERS, str(bundle)], cwd=root, check=True
    )


def test_the_module_is_a_command(bundle: Path, root: Path) -> None:
    command = [sys.executable, "-m", "runtime", "generate", str(bundle), "--prompt", "ab"]
    done = subprocess.run([*command, "--max-tokens", "3"], cwd=root, capture_output=True, text=True)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 4, "")
