"""The benchmark: every figure follows from the runs, and no contestant has an easier time."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from helpers_runtime import VOCAB, latency_report, near_table, target_table, write_bundle
from typer.testing import CliRunner

from runtime.bench.plan import Contestant, Run, interleave, parse_draft_lengths
from runtime.bench.prompts import SHIPPED, Prompt, categories, load_prompts
from runtime.bench.summary import ALL, Sample, summarize
from runtime.cli import app
from runtime.errors import InvalidRequest
from runtime.manifest import NgramDraft


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = target_table(VOCAB)
    latency = latency_report(row=0.1, draft=0.1)
    path = tmp_path_factory.mktemp("bench") / "tiny"
    return write_bundle(path, table, near_table(table, 0.5), latency=latency)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    rows = [
        {"question_id": 1, "category": "short", "turns": ["Hi.", "unused"]},
        {"prompt": "def f(", "category": "code"},
        {"prompt": "def g(", "category": "code"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_bench(*arguments: object) -> dict:
    done = CliRunner().invoke(app, ["bench", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_one_run_measures_every_mode_and_category(
    bundle: Path, prompt_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ("--prompts", prompt_file, "-k", "1,3,auto", "--max-tokens", 16, "--out", out)
    result = run_bench(bundle, *arguments, "--repeats", 2, "--ignore-eos")
    figures = {(f["mode"], f["category"]): f for f in result["figures"]}
    modes = ("plain", "k=1", "k=3", "auto")
    assert set(figures) == {(m, c) for m in modes for c in (ALL, "short", "code")}
    assert figures["plain", ALL]["num_requests"] == 3 * 2
    assert figures["plain", ALL]["num_output_tokens"] == 3 * 2 * 16
    assert figures["plain", ALL]["acceptance_rate"] is None
    assert figures["plain", ALL]["speedup"] is None
    assert json.loads((out / "bench.json").read_text()) == result
    assert len((out / "samples.jsonl").read_text().splitlines()) == len(modes) * 3 * 2


def test_speculation_counts_add_up(bundle: Path, prompt_file: Path) -> None:
    arguments = ("--prompts", prompt_file, "-k", "3", "--max-tokens", 16, "--ignore-eos")
    result = run_bench(bundle, *arguments, "--repeats", 1)
    (k3,) = (f for f in result["figures"] if f["mode"] == "k=3" and f["category"] == ALL)
    accepted = sum(i * count for i, count in enumerate(k3["acceptance_histogram"]))
    drafted_rounds = sum(k3["acceptance_histogram"])
    assert accepted > 0
    assert k3["mean_acceptance_length"] == pytest.approx(1 + accepted / drafted_rounds)
    assert 1 < k3["tokens_per_round"] <= k3["mean_acceptance_length"] + 1e-9
    assert k3["same_as_plain"] == 1.0
    assert 0 < k3["orchestration_share"] < 1
    (floor,) = result["floors"]
    assert floor["num_steps"] > 0
    assert floor["round_s"] > floor["target_step_s"] > 0


def test_two_bundles_run_beside_each_other_and_tables_are_printed(
    bundle: Path, prompt_file: Path, tmp_path: Path
) -> None:
    other = write_bundle(tmp_path / "plain-only", target_table(VOCAB), None)
    options = ["--prompts", str(prompt_file), "--limit", "1", "--repeats", "1", "--max-tokens", "4"]
    done = CliRunner().invoke(app, ["bench", str(bundle), str(other), *options])
    assert done.exit_code == 0, done.output
    for word in ("tiny", "plain-only", "auto", "short", "code", "Speed", "Rounds"):
        assert word in done.stdout


def test_a_draft_length_beyond_the_bundle_names_the_limit(bundle: Path) -> None:
    done = CliRunner().invoke(app, ["bench", str(bundle), "-k", "9"])
    assert done.exit_code == 1
    assert "received 9. Expected at most 4" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("-k", "fast", "Expected numbers, auto and trees"),
        ("--tasks", "mmlu", "Expected one of shipped, humaneval, rewrite"),
        ("--prompts", "nowhere.jsonl", "can't be read"),
        ("--repeats", "0", "--repeats"),
        ("--max-tokens", "1", "--max-tokens"),
        ("--max-tokens", "100", "--max-context"),
    ],
)
def test_bad_options_are_one_clear_line(bundle: Path, option: str, value: str, word: str) -> None:
    done = CliRunner().invoke(app, ["bench", str(bundle), option, value])
    assert done.exit_code == 1, done.output
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_prompts_too_long_for_a_bundle_are_left_out_by_name(
    bundle: Path, prompt_file: Path
) -> None:
    with prompt_file.open("a") as file:
        file.write(json.dumps({"id": "long", "category": "code", "prompt": "x" * 90}) + "\n")
    arguments = ("--prompts", prompt_file, "--max-tokens", 8, "--repeats", 1, "-k", "1")
    assert run_bench(bundle, *arguments)["skipped"] == ["prompts:long"]


def test_the_shipped_prompts_cover_code_editing_and_talk() -> None:
    prompts = load_prompts([], [], None)
    counts = Counter(prompt.category for prompt in prompts)
    assert len(prompts) >= 24
    assert {"code_completion", "code_editing", "summarization", "qa"} <= set(counts)
    assert min(counts.values()) >= 2
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert SHIPPED.stat().st_size < 20_000


def test_limit_counts_per_category() -> None:
    prompts = load_prompts([], [], 1)
    assert [p.category for p in prompts] == list(categories(load_prompts([], [], None)))


def test_humaneval_layouts(tmp_path: Path) -> None:
    assert len(load_prompts([], ["humaneval"], None)) == 164
    path = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n"}) + "\n")
    (prompt,) = load_prompts([path], [], None)
    assert (prompt.category, prompt.content) == ("humaneval", "def f():\n")
    assert not prompt.is_chat


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"prompt": ""}', '{"turns": []}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(InvalidRequest, match=r"p\.jsonl:2"):
        load_prompts([path], [], None)


def test_draft_lengths_are_read_once_each() -> None:
    assert parse_draft_lengths("4, 1,auto,1,0") == (4, 1, "auto")


def test_interleaving_is_complete_and_never_repeats_a_prompt_at_once() -> None:
    contestants = [Contestant(bundle="b", draft_length=k) for k in (0, 1, "auto")]
    prompts = [Prompt(id=str(i), category="c", content="x") for i in range(5)]
    runs = list(interleave(contestants, prompts, 3))
    counts = Counter((r.contestant, r.prompt.id, r.repeat) for r in runs)
    assert len(counts) == 3 * 5 * 3
    assert set(counts.values()) == {1}
    assert all(a.prompt.id != b.prompt.id for a, b in pairwise(runs))
    firsts = {runs[i].contestant for i in range(0, len(runs), 3)}
    assert firsts == set(contestants)


def test_rates_are_summed_before_they_are_divided() -> None:
    def sample(contestant: Contestant, repeat: int, tokens: int, seconds: float) -> Sample:
        prompt = Prompt(id=f"{tokens}", category="c", content="x")
        counts = {"num_output_tokens": tokens + 1, "num_decode_tokens": tokens}
        times = {"decode_s": seconds, "verify_s": seconds / 2}
        times |= dict.fromkeys(("draft_s", "accept_s", "compact_s"), 0)
        steps = {"num_spec_steps": 0, "num_plain_steps": tokens, "num_draft_tokens": 0}
        rest = {"num_accepted_draft_tokens": 0, "ttft_s": 1.0, "overhead_s": seconds / 2}
        stats = {**counts, **times, **steps, **rest, "acceptance_histogram": [0, 0]}
        run = Run(contestant=contestant, prompt=prompt, repeat=repeat)
        return Sample(run=run, token_ids=(1,) * tokens, stats=stats)

    plain = Contestant(bundle="b", draft_length=0)
    fast = Contestant(bundle="b", draft_length=2)
    samples = [sample(plain, r, n, s) for r in (0, 1) for n, s in ((10, 1.0), (90, 4.0))]
    samples += [sample(fast, 0, 10, 1.0), sample(fast, 0, 90, 1.0), sample(fast, 1, 90, 3.0)]
    slow, quick = summarize(samples, [plain, fast], greedy=True)
    assert slow.decode_tokens_per_s.median == 20.0
    assert slow.output_tokens_per_s.median == pytest.approx(102 / 7)
    assert slow.orchestration_share == 0.5
    assert (quick.decode_tokens_per_s.low, quick.decode_tokens_per_s.high) == (30.0, 50.0)
    assert quick.speedup is not None
    assert (quick.speedup.low, quick.speedup.high) == (1.5, 2.5)


def test_rewrite_prompts_come_from_the_library() -> None:
    """Functions of this Python, the same ones each time, each with a name that it uses."""
    prompts = load_prompts([], ["rewrite"], None)
    assert len(prompts) > 10
    assert prompts == load_prompts([], ["rewrite"], None)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.is_chat
        text = prompt.content[0]["content"]
        found = re.match(r"Rewrite this .* rename `(\w+)` to `new_\1`\.", text)
        assert found, text
        source = text.split("```")[1].removeprefix("python\n")
        compile(source, prompt.id, "exec")
        assert len(re.findall(rf"\b{found[1]}\b", source)) >= 3


def test_a_lookup_is_a_drafter_like_another(tmp_path: Path) -> None:
    """Its draft cost is measured, and how many rounds drafted is told."""
    latency = latency_report(row=0.1, draft=0.0)
    draft = NgramDraft(min_ngram=1, max_ngram=3)
    options = ("--tasks", "rewrite", "--limit", 1, "--repeats", 1, "--max-tokens", 16)
    table = target_table(VOCAB)
    table[:, :3] += 20.0  # three tokens, so that they repeat
    path = write_bundle(tmp_path / "lookup", table, draft, latency=latency, context=2048)
    result = run_bench(path, *options, "-k", "2,auto", "--ignore-eos")
    assert result["bundles"]["lookup"]["draft"] == "n-grams of 1 to 3 tokens"
    figures = {f["mode"]: f for f in result["figures"]}
    assert 0 < figures["k=2"]["num_spec_rounds"] <= figures["k=2"]["num_rounds"]
    assert figures["k=2"]["round_s"]["draft"] > 0
    assert figures["plain"]["num_spec_rounds"] == 0
