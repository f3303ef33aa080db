"""Bad input to the build: one clear line on stderr, exit code 1, and nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_build import CONFIG, DRAFT_POSITIONS, POSITIONS
from safetensors.torch import load_file, save_file
from tiny_checkpoints import VOCAB, edit_json, llama_config, save, tokenizer, tokens
from transformers import MixtralConfig
from typer.testing import CliRunner

from export import build as build_module
from export import graphs, static_attention, trace
from export.build import BuildRequest, build
from export.cli import app
from runtime.bundle import Bundle
from runtime.errors import BuildError, BundleError

Spoil = Callable[[Path], object]


def refused(out: Path, *arguments: str) -> str:
    """The one line of a build that must fail; nothing is left or changed beside `out`."""
    before = sorted(out.parent.iterdir())
    result = CliRunner().invoke(app, ["build", *arguments, "--out", str(out)])
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    *progress, line = result.stderr.splitlines()
    assert all(earlier.startswith("· ") for earlier in progress)
    assert line.startswith("error: ")
    assert sorted(out.parent.iterdir()) == before
    return line


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "bundle"


@pytest.fixture
def copy(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "copy"))


# Checkpoints


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def replace_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_text("<html>404 not found</html>")


def remove(name: str) -> Spoil:
    return lambda directory: (directory / name).unlink()


def configure(**changes: object) -> Spoil:
    return lambda directory: edit_json(directory / "config.json", **changes)


def drop_tensor(name: str) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = {key: tensor for key, tensor in load_file(path).items() if key != name}
        save_file(tensors, path, metadata={"format": "pt"})

    return spoil


def make_mixture(directory: Path) -> None:
    MixtralConfig(num_hidden_layers=1, num_local_experts=4).save_pretrained(directory)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (configure(model_type="marvin"), "model type 'marvin', which transformers cannot read"),
        (configure(model_type="t5"), "t5"),
        (make_mixture, "mixtral: received a model with .*experts"),
        (truncate, "model.safetensors: received .* no whole safetensors file"),
        (replace_weights, "model.safetensors: received .* no whole safetensors file"),
        (remove("model.safetensors"), "received no weights. Expected model.safetensors"),
        (remove("config.json"), "config.json: received no such file"),
        (remove("tokenizer.json"), "received no readable tokenizer"),
        (drop_tensor("model.norm.weight"), r"missing.*model\.norm\.weight"),
    ],
)
@pytest.mark.usefixtures("kept_traces")
def test_target_that_is_no_sound_checkpoint(
    copy: Path, out: Path, spoil: Spoil, message: str
) -> None:
    spoil(copy)
    assert_matches(message, refused(out, "--target", str(copy)))


def assert_matches(pattern: str, text: str) -> None:
    __tracebackhide__ = True
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/at/all", "received no such directory"),
        ("file.txt", "received no such directory"),
        ("file.gguf", "GGUF"),
        ("missing.gguf", "received no such file"),
        ("owner/not-in-the-cache", "no snapshot from the hub or its cache"),
    ],
)
def test_target_that_is_no_checkpoint(tmp_path: Path, out: Path, name: str, message: str) -> None:
    for file in ("file.txt", "file.gguf"):
        (tmp_path / file).write_text("something else entirely")
    given = name if "/" in name else str(tmp_path / name)
    assert_matches(message, refused(out, "--target", given))


def test_model_that_the_trace_refuses(
    copy: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter wraps what is raised inside it: the message comes through all the same."""
    monkeypatch.setattr(graphs, "trace_decoder", trace.trace_decoder)
    monkeypatch.setattr(static_attention, "_INERT", frozenset())
    message = refused(out, "--target", str(copy))
    assert_matches(r"LlamaAttention: received attention arguments \['dropout', .*'\]", message)


def test_trace_that_fails(copy: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*_: object, **__: object) -> None:
        raise ArithmeticError("first line\nsecond line")

    monkeypatch.setattr(graphs, "trace_decoder", trace.trace_decoder)
    monkeypatch.setattr(static_attention.AttentionRecorder, "attend", attend)
    message = refused(out, "--target", str(copy))
    assert "LlamaForCausalLM: the trace failed (ArithmeticError: first line)." in message


# Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int3"], "--precision: received 'int3'. Expected one of fp32, int8, int4"),
        (["--draft-precision", "fp8"], "--draft-precision: received 'fp8'"),
        (["--backend", "vulkan"], "--backend: received 'vulkan'. Expected one of onnxruntime"),
        (["--max-batch", "2"], "--max-batch: received 2. Expected 1"),
        (["--max-batch", "0"], "--max-batch: received 0. Expected 1"),
        (
            ["--max-context", str(POSITIONS + 1)],
            f"--max-context: received {POSITIONS + 1}. Expected 16 to {POSITIONS}, the positions",
        ),
        (["--max-context", "8"], "--max-context: received 8. Expected 16 to"),
        (["-k", "0"], f"-k: received 0. Expected 1 to {DRAFT_POSITIONS // 2} for a draft with"),
        (["-k", "-1"], "-k: received -1. Expected 1 to"),
        (["-k", "25"], "-k: received 25. Expected 1 to 24 for a draft with a context of 48"),
        (["--max-context", "32", "-k", "17"], "-k: received 17. Expected 1 to 16"),
    ],
)
def test_options_beyond_what_can_be_built(
    tiny_target: Path, tiny_draft: Path, out: Path, arguments: list[str], message: str
) -> None:
    """The flag and its limit are named."""
    given = ["--target", str(tiny_target), "--draft", str(tiny_draft), *arguments]
    assert_matches(message, refused(out, *given))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--draft", "ngram", "--min-ngram", "0"],
            "--min-ngram 0 --max-ngram 4: received",
        ),
        (["--draft", "ngram", "--min-ngram", "5", "--max-ngram", "3"], "Expected 1 ≤ min ≤ max ≤"),
        (["--draft", "ngram", "--max-ngram", "17"], "--max-ngram 17: received no range"),
        (["--draft", "ngram", "--draft-precision", "int4"], "--draft-precision int4: received it"),
        (["--draft", "ngram", "-k", "65"], f"-k: received 65. Expected 1 to {POSITIONS // 2}"),
        (["--draft", "none", "--min-ngram", "2"], "--min-ngram 2: received it without its drafter"),
        (["--max-ngram", "2"], "Expected --draft ngram, which alone has such bounds"),
        (["--draft", "ngram+x", "--min-ngram", "0"], "--min-ngram 0 --max-ngram 4: received"),
        (["--draft", "ngram+"], "--draft ngram+: received no draft model behind the lookup"),
        (["--draft", "ngram+ngram"], "--draft ngram+ngram: received no draft model"),
        (["--draft", "ngram+none"], "--draft ngram+none: received no draft model"),
        (["--draft", "ngram+ngram+x"], "Expected ngram+PATH, the directory or hub id of a draft"),
        (["--draft", "layer-skip", "--skip-layers", "1-2"], "--skip-layers: received '1-2'"),
        (["--draft", "layer-skip", "--skip-layers", "0,1"], "0 to 1, and not all of them"),
        (["--draft", "layer-skip", "--search-seconds", "0"], "--search-seconds: received 0. Exp"),
        (
            ["--draft", "layer-skip", "--skip-layers", "1", "--search-seconds", "9"],
            "--search-seconds: received it with --skip-layers",
        ),
        (["--draft", "layer-skip", "--min-ngram", "2"], "--min-ngram 2: received it without"),
        (
            ["--draft", "layer-skip", "--draft-precision", "int4"],
            "--draft-precision int4: received it without",
        ),
        (["--draft", "ngram", "--skip-layers", "1"], "Expected --draft layer-skip, which alone"),
        (["--search-seconds", "5"], "--search-seconds 5.0: received it without its drafter"),
        (["--draft", "layer-skip", "--retokenize"], "--retokenize: received it without its"),
        (["--draft", "ngram+layer-skip"], "--draft ngram+layer-skip: received no draft model"),
    ],
)
def test_bounds_of_a_lookup(
    tiny_target: Path, out: Path, arguments: list[str], message: str
) -> None:
    assert_matches(re.escape(message), refused(out, "--target", str(tiny_target), *arguments))


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_output_that_exists_is_left_as_it_is(tiny_target: Path, out: Path, kind: str) -> None:
    if kind == "directory":
        out.mkdir()
        (out / "precious").write_text("work")
    elif kind == "file":
        out.write_text("work")
    else:
        out.symlink_to(out.parent / "gone")
    assert "received a path that exists" in refused(out, "--target", str(tiny_target))
    if kind == "directory":
        assert (out / "precious").read_text() == "work"


def test_output_that_cannot_be_written(tiny_target: Path, out: Path) -> None:
    (out.parent / "file").write_text("")
    inside = out.parent / "file" / "bundle"
    result = CliRunner().invoke(app, ["build", "--target", str(tiny_target), "--out", str(inside)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: --out")


# Drafts


def other_tokens(directory: Path, *, rows: int, token_7: str) -> Path:
    """A draft with `rows` rows whose tokenizer names one token otherwise."""
    save(directory, llama_config(vocab_size=rows, hidden_size=64))
    names = tokens()
    names[names.index("<pad7>")] = token_7
    tokenizer(names).save(str(directory / "tokenizer.json"))
    return directory


def test_draft_with_another_vocabulary(tiny_target: Path, tmp_path: Path, out: Path) -> None:
    draft = other_tokens(tmp_path / "draft", rows=VOCAB + 12, token_7="<other>")
    message = refused(out, "--target", str(tiny_target), "--draft", str(draft))
    index = tokens().index("<pad7>")
    rows = (f"{VOCAB + 12} rows", f"{VOCAB} rows")
    for part in (*rows, f"token {index} is '<other>'", "'<pad7>'", "build with --retokenize"):
        assert part in message


@pytest.mark.parametrize("own", [True, False], ids=["the target itself", "distilled from it"])
def test_nothing_to_retokenize(tiny_target: Path, tiny_draft: Path, out: Path, own: bool) -> None:
    draft = tiny_target if own else tiny_draft
    message = refused(out, "--target", str(tiny_target), "--draft", str(draft), "--retokenize")
    assert f"--retokenize: received {draft.name}, which speaks the tokens of" in message
    assert "build without --retokenize" in message


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_a_lookup_has_nothing_to_retokenize(tiny_target: Path, out: Path, draft: str) -> None:
    message = refused(out, "--target", str(tiny_target), "--draft", draft, "--retokenize")
    assert "--retokenize: received it without its drafter. Expected --draft PATH" in message


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("tokenizer.json"), "received no readable tokenizer"),
        (configure(vocab_size=270), "received a tokenizer with token 279. Expected tokens below"),
    ],
)
def test_a_draft_whose_text_cannot_be_read(
    tiny_target: Path, tmp_path: Path, out: Path, spoil: Spoil, message: str
) -> None:
    draft = other_tokens(tmp_path / "draft", rows=VOCAB, token_7="<other>")
    spoil(draft)
    given = ["--target", str(tiny_target), "--draft", str(draft), "--retokenize"]
    assert message in refused(out, *given)


def test_draft_with_a_padded_vocabulary_is_tolerated(
    tiny_target: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checks pass: the build gets as far as writing."""
    draft = other_tokens(tmp_path / "draft", rows=VOCAB + 12, token_7="<pad7>")

    def fill(*_: object) -> None:
        raise BuildError("writing")

    monkeypatch.setattr(build_module, "_fill", fill)
    with pytest.raises(BuildError, match=r"^writing$"):
        build(BuildRequest(target=str(tiny_target), draft=str(draft), out=out))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (configure(hidden_size=32), "hidden size 32. Expected 64"),
        (configure(outrider={"target_vocab_size": 99}), "a target of 99 tokens"),
        (configure(max_position_embeddings=8), "knows 8 positions. Expected at least 16"),
        (truncate, "no whole safetensors file"),
        (remove("config.json"), "config.json: received no such file"),
    ],
)
def test_draft_that_does_not_fit(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, out: Path, spoil: Spoil, message: str
) -> None:
    draft = Path(shutil.copytree(tiny_draft, tmp_path / "draft"))
    spoil(draft)
    assert_matches(message, refused(out, "--target", str(tiny_target), "--draft", str(draft)))


# Interruptions of a real build, in a process of its own


def heed_signals() -> None:
    """In a new process: whoever runs the tests may ignore or block SIGINT, and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])


def interrupted(target: Path, out: Path, root: Path, number: int) -> tuple[int, str]:
    """Exit code and stderr of a build that got a signal once it had begun to write."""
    command = [
        sys.executable,
        "-m",
        "export",
        "build",
        "--target",
        str(target),
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    try:
        deadline = time.monotonic() + 300
        while not list(out.parent.glob(".bundle.partial-*/onnx")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    return process.returncode, stderr


def test_killed_build_leaves_nothing_that_loads_and_is_cleared_by_the_next(
    kept_traces: None, tiny_target: Path, out: Path, root: Path
) -> None:
    code, _ = interrupted(tiny_target, out, root, signal.SIGKILL)
    assert code == -signal.SIGKILL
    (partial,) = out.parent.iterdir()
    assert partial != out
    with pytest.raises(BundleError, match="unfinished build"):
        Bundle.load(partial)
    build(BuildRequest(target=str(tiny_target), draft=None, out=out, precision="int4"))
    assert list(out.parent.iterdir()) == [out]
    assert Bundle.load(out).manifest.target.precision == "int4"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_build_that_is_told_to_end_cleans_up(
    tiny_target: Path, out: Path, root: Path, number: int
) -> None:
    code, stderr = interrupted(tiny_target, out, root, number)
    assert code not in (0, -signal.SIGKILL)
    assert "Traceback" not in stderr
    assert list(out.parent.iterdir()) == []


def test_the_fixture_is_what_the_tests_say(tiny_target: Path) -> None:
    """The draft's positions are fewer than the target's."""
    config = json.loads((tiny_target / "config.json").read_text())
    assert config["max_position_embeddings"] == POSITIONS > DRAFT_POSITIONS
    assert config["hidden_size"] == CONFIG.hidden_size == 64
