"""The README keeps its word: every command in it is known, and run as far as the machine allows.

A command of a ```bash block is one logical line (a backslash continues it). It is

- covered elsewhere (`scripts/demo`, `scripts/test`, `pip install`): checked to exist, and to know
  the options;
- run, with the paths of the README replaced by a small bundle made here, or by the built demo;
- otherwise a failure: a new kind of command needs a line in RULES.

Examples in the help texts (`Example: python -m …`) are held to the same rules.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT
from helpers_runtime import VOCAB, latency_report, near_table, target_table, write_bundle

README = ROOT / "README.md"
PACKAGES = ("runtime", "export", "calibration")
DEMO = ROOT / "build" / "demo"
DEMO_NAMES = ("build/demo", "bundle/", "BUNDLE")  # how texts name a bundle
NO_DEMO = "needs the demo bundle in build/demo; run scripts/demo"
PLACEHOLDER = re.compile(r"…|\.\.\.$|^[A-Z_]+$")
TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one kind of command is tested: `pattern` against its start, first match counts."""

    pattern: str
    how: str  # file | parse | tiny | demo
    needs: str = ""  # marker


RULES = (
    Rule(pattern=r"(bash )?scripts/(demo|test|gpu_pack|gpu_check)\b", how="file"),
    Rule(pattern=r"(python3? )?scripts/\w+\.py\b", how="script"),
    Rule(pattern=r"(python3? )?examples/compare\.py\b", how="tiny"),
    Rule(pattern=r"(pip3?|python3? -m (pip|venv)|source|git|cd|uv) ?", how="known"),
    Rule(pattern=r"python -m runtime (generate|bench)\b", how="tiny"),
    Rule(pattern=r"python -m export (inspect|check)\b", how="tiny"),
    Rule(pattern=r"python -m (export build|calibration|runtime serve)\b", how="parse"),
    Rule(pattern=r"python -m \w+ ?(\w+ )?--help$", how="tiny"),
)


def commands_of(markdown: str) -> list[str]:
    """The logical command lines of all ```bash and ```console blocks."""
    found = []
    for block in re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", markdown, re.M | re.S):
        joined = re.sub(r"\s*\\\n\s*", " ", block)
        for line in joined.splitlines():
            command = line.removeprefix("$ ").strip()
            if command and not command.startswith("#"):
                found.append(command)
    return found


def help_examples(text: str) -> list[str]:
    """Commands that a help text ends with, rejoined where the terminal's width broke them."""
    tail = re.sub(r"\s+", " ", text.rpartition("Example")[2])
    return [m.strip() for m in re.findall(r"python -m .*?(?=python -m |$)", tail)]


def readme() -> str:
    return README.read_text(encoding="utf-8") if README.is_file() else ""


def readme_commands() -> list[str]:
    return commands_of(readme())


def readme_programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", readme(), re.M | re.S)


def plain(command: str) -> str:
    """Without environment settings, a comment behind it, and the venv's path."""
    command = re.sub(r"^(\w+=\S+ )+", "", command)
    command = re.sub(r"\s+#.*$", "", command)
    return re.sub(r"^(?:\./)?(?:\.venv/bin/)", "", command.removeprefix("./"))


def rule_for(command: str) -> Rule:
    for rule in RULES:
        if re.match(rule.pattern, plain(command)):
            return rule
    raise AssertionError(f"{command!r}: no rule says how to test this; add one to RULES")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = target_table(VOCAB)
    path = tmp_path_factory.mktemp("readme") / "tiny"
    latency = latency_report(row=0.1, draft=0.1)
    return write_bundle(path, table, near_table(table, 0.5), context=1024, latency=latency)


def run_on(bundle: Path) -> Callable[[str, Path], None]:
    def run(command: str, folder: Path) -> None:
        words = [_resolved(word, bundle) for word in shlex.split(plain(command))]
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        words = [sys.executable, *words[words[0].startswith("python") :]]
        done = subprocess.run(
            words,
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.stdout.strip(), f"{command}: printed no result"

    return run


def _resolved(word: str, bundle: Path) -> str:
    if word.rstrip("/") in {name.rstrip("/") for name in DEMO_NAMES}:
        return str(bundle)
    return "Once upon a time" if word == "…" else word


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def parse_only(command: str) -> None:
    """The subcommand exists and knows every option that is named."""
    words = shlex.split(plain(command))
    package, subcommand = words[2], [w for w in words[3:4] if not w.startswith("-")]
    _knows_options(command, _help([sys.executable, "-m", package, *subcommand]))


def _help(words: list[str]) -> str:
    done = subprocess.run(
        [*words, "--help"],
        cwd=ROOT,
        env={**_environment(), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _knows_options(command: str, text: str) -> None:
    words = (word.partition("=")[0] for word in shlex.split(plain(command)))
    for option in words:
        if option.startswith("-") and option != "-m":
            assert re.search(rf"(?<![\w-]){option}\b", text), f"{command}: no {option}"


def check(command: str, how: str, tiny: Path, folder: Path) -> None:
    words = shlex.split(plain(command))
    if how == "file":
        path = next(ROOT / word for word in words if word.startswith("scripts/"))
        assert path.is_file(), f"{command}: {path.name} is not there"
        _knows_options(command, path.read_text(encoding="utf-8"))
    elif how == "script":
        at = next(i for i, word in enumerate(words) if word.startswith("scripts/"))
        # What a subcommand's help says, where there is one.
        first = [word for word in words[at + 1 : at + 2] if not word.startswith("-")]
        _knows_options(command, _help([sys.executable, words[at], *first]))
    elif how == "tiny":
        run_on(tiny)(command, folder)
    elif how == "demo":
        if not (DEMO / "manifest.json").is_file():
            pytest.skip(NO_DEMO)
        run_on(DEMO)(command, folder)
    elif how == "parse":
        parse_only(command)


def _parameters() -> list:
    found = []
    for command in dict.fromkeys(readme_commands()):
        marks = []
        for rule in RULES:
            if re.match(rule.pattern, plain(command)):
                marks = [getattr(pytest.mark, rule.needs)] if rule.needs else []
                break
        found.append(pytest.param(command, id=command[:60], marks=marks))
    return found


@pytest.mark.parametrize("command", _parameters())
def test_every_command_of_the_readme_works(command: str, tiny: Path, tmp_path: Path) -> None:
    check(command, rule_for(command).how, tiny, tmp_path)


@pytest.mark.model
@pytest.mark.parametrize("command", _parameters())
def test_commands_on_a_bundle_work_on_the_demo(command: str, tmp_path: Path) -> None:
    if rule_for(command).how != "tiny" or "build/demo" not in command:
        pytest.skip("not about a bundle")
    if "--tasks" in command or "export check" in command:
        pytest.skip("minutes long on a real model; run on the small bundle above")
    if not (DEMO / "manifest.json").is_file():
        pytest.skip(NO_DEMO)
    run_on(DEMO)(command, tmp_path)


@pytest.mark.parametrize("program", readme_programs())
def test_every_program_of_the_readme_works(program: str, tiny: Path, tmp_path: Path) -> None:
    for name in DEMO_NAMES:
        program = re.sub(rf"([\"\']){name}/?([\"\'])", rf"\g<1>{tiny}\g<2>", program)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr


def subcommands(package: str) -> list[str]:
    """Of a package's typer application; empty where it has no command line yet."""
    try:
        app = importlib.import_module(f"{package}.cli").app
    except ModuleNotFoundError as error:
        if error.name in (f"{package}.cli", package):
            return []
        raise
    names = [c.name or c.callback.__name__.replace("_", "-") for c in app.registered_commands]
    return ["", *names]


@pytest.mark.parametrize(
    ("package", "name"),
    [(package, name) for package in PACKAGES for name in subcommands(package)],
)
def test_every_help_ends_with_an_example_that_works(
    package: str, name: str, tiny: Path, tmp_path: Path
) -> None:
    shown = _help([sys.executable, "-m", package, *([name] if name else [])])
    examples = help_examples(shown)
    assert examples, f"python -m {package} {name} --help ends without an example"
    for example in examples:
        check(example, rule_for(example).how, tiny, tmp_path)


def test_commands_are_found_in_a_readme() -> None:
    text = "# A\n```bash\n# a remark\n$ scripts/demo\npython -m export build \\\n    --out x\n```\n"
    assert commands_of(text + "```python\nprint()\n```\n") == [
        "scripts/demo",
        "python -m export build --out x",
    ]


def test_an_unknown_command_is_not_passed_over() -> None:
    with pytest.raises(AssertionError, match="no rule"):
        rule_for("rm -rf /")


@pytest.mark.parametrize("name", ["demo", "test", "gpu_pack", "gpu_check"])
def test_a_script_asked_for_help_does_nothing_else(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [os.path.relpath(ROOT / "scripts" / name, tmp_path), "--help"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=os.environ | {"OUTRIDER_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"scripts/{name} " in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_pack_of_wheels_has_a_folder(tmp_path: Path) -> None:
    for wrong in ([], ["x", "--onnx"], ["--onnxruntime"]):
        done = subprocess.run(
            [str(ROOT / "scripts" / "gpu_pack"), *wrong],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2
        assert f"received '{' '.join(wrong)}'. Expected a directory for the wheels" in done.stderr
    assert not list(tmp_path.iterdir())
