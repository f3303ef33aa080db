"""The comparison is honest by construction: zero against itself, opposite when exchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_calibration import (
    DRAFT,
    FAST,
    NEAR_DRAFT,
    NEAR_TARGET,
    TARGET,
    altered,
    failed_compare,
    run_compare,
    write_prompts,
    write_tables,
)
from helpers_runtime import VOCAB, logits_after, reference_greedy, target_table, write_bundle

from calibration.comparison.sides import DIFFERENCES

SWAPPED = {"reference": "bundle", "bundle": "reference"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def bundles(folder: Path) -> dict[str, Path]:
    return write_tables(folder)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Path:
    return write_prompts(folder / "prompts.jsonl", count=8)


@pytest.fixture(scope="module")
def result(folder: Path, bundles: dict[str, Path], prompts: Path) -> dict[str, Any]:
    return run_compare(
        bundles["bundle"], "--reference", bundles["reference"], "--prompts", prompts, *FAST,
        "--out", folder / "out",
    )  # fmt: skip


def laws(table: np.ndarray, tokens: list[int], temperature: float) -> np.ndarray:
    logits = logits_after(table, tokens).astype(np.float64)
    if temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(float)
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def test_acceptance_is_the_overlap_along_the_stored_text(result: dict[str, Any]) -> None:
    tables = {"reference": (TARGET, DRAFT), "bundle": (NEAR_TARGET, NEAR_DRAFT)}
    for cell in (
        c for c in result["cells"] if c["category"] == "all" and c["temperature"] != "all"
    ):
        for key, found in cell["acceptance"].items():
            target, draft = key.split("+")
            overlaps = []
            for prompt in result["prompts"]:
                text = prompt["paths"][repr(cell["temperature"])]
                for i in range(len(text)):
                    tokens = [*prompt["tokens"], *text[:i]]
                    p = laws(tables[target][0], tokens, cell["temperature"])
                    q = laws(tables[draft][1], tokens, cell["temperature"])
                    overlaps.append(np.minimum(p, q).sum())
            assert found["value"] == pytest.approx(np.mean(overlaps), abs=1e-6)
            assert cell["tokens"] == len(overlaps)


def test_drift_is_that_of_the_two_laws_along_the_text(result: dict[str, Any]) -> None:
    (cell,) = [c for c in result["cells"] if c["category"] == "all" and c["temperature"] == 1.0]
    kls, nlls, flips = [], [], []
    for prompt in result["prompts"]:
        text = prompt["paths"]["1.0"]
        for i, token in enumerate(text):
            tokens = [*prompt["tokens"], *text[:i]]
            p, q = laws(TARGET, tokens, 1.0), laws(NEAR_TARGET, tokens, 1.0)
            kls.append((p * np.log(p / q)).sum())
            nlls.append(-np.log(q[token]))
            flips.append(p.argmax() != q.argmax())
    drift = cell["drift"]
    assert drift["kl"]["value"] == pytest.approx(np.mean(kls), rel=1e-6)
    assert drift["perplexity_bundle"] == pytest.approx(np.exp(np.mean(nlls)), rel=1e-6)
    assert drift["flip_rate"]["value"] == pytest.approx(np.mean(flips))
    assert 0 < np.mean(flips) < 1


def test_the_greedy_text_is_the_reference_s_own(result: dict[str, Any]) -> None:
    for prompt in result["prompts"]:
        text = prompt["paths"]["0.0"]
        assert text == reference_greedy(TARGET, prompt["tokens"], len(text))


def test_the_first_difference_is_where_greedy_texts_part(result: dict[str, Any]) -> None:
    parted = 0
    for prompt, found in zip(result["prompts"], result["first_differences"], strict=True):
        text = prompt["paths"]["0.0"]
        other = reference_greedy(NEAR_TARGET, prompt["tokens"], len(text))
        first = next((i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b), None)
        assert found["position"] == first
        parted += first is not None
    assert parted > 0


def test_position_1_of_the_rounds_accepts_what_the_laws_say(result: dict[str, Any]) -> None:
    """Each round's place in the text is known, so position 1 is computable by hand."""
    for temperature in (0.0, 1.0):
        overlaps = []
        for prompt in result["prompts"]:
            text = prompt["paths"][repr(temperature)]
            for start in {len(text) // 4, 3 * len(text) // 4}:
                tokens = [*prompt["tokens"], *text[:start]]
                p, q = laws(TARGET, tokens, temperature), laws(DRAFT, tokens, temperature)
                overlaps.append(np.minimum(p, q).sum())
        (row,) = [
            r for r in result["positions"] if r["temperature"] == temperature and r["position"] == 1
        ]
        found = row["acceptance"]["reference+reference"]["value"]
        assert found == pytest.approx(np.mean(overlaps), abs=1e-6)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield float(value)


def test_a_bundle_compared_with_itself_differs_by_exactly_nothing(
    folder: Path, bundles: dict[str, Path], prompts: Path
) -> None:
    same = run_compare(
        bundles["bundle"], "--reference", bundles["bundle"], "--prompts", prompts, *FAST,
        "--max-acceptance-drop", "0", "--max-kl", "0", "--out", folder / "itself",
    )  # fmt: skip
    assert_no_difference(same)
    assert "1.00 ×" in same["recommendation"]


def assert_no_difference(result: dict[str, Any]) -> None:
    for row in (*result["cells"], *result["positions"], *result["lengths"]):
        found = list(numbers(row["differences"]))
        assert found
        assert set(found) == {0.0}, row["differences"]
    for cell in result["cells"]:
        drift = cell["drift"]
        for name in ("kl", "tv", "flip_rate", "nll_difference"):
            assert set(numbers(drift[name])) == {0.0}
        assert drift["perplexity_bundle"] == drift["perplexity_reference"]
    for length in result["lengths"]:
        for name in ("predicted", "realised", "free"):
            assert len(set(length[name].values())) == 1
    assert all(d["position"] is None for d in result["first_differences"])
    assert result["findings"] == []
    assert result["failures"] == []


def swapped_name(name: str) -> str:
    for side, other in SWAPPED.items():
        if f"{side}'s" in name:
            return name.replace(side, other)
    return name


def test_exchanging_the_two_turns_every_sign(
    folder: Path, bundles: dict[str, Path], prompts: Path, result: dict[str, Any]
) -> None:
    exchanged = run_compare(
        bundles["reference"], "--reference", bundles["bundle"], "--prompts", prompts, *FAST,
        "--paths", folder / "out" / "compare.json", "--out", folder / "exchanged",
    )  # fmt: skip
    signs = 0
    for rows in ("cells", "positions", "lengths"):
        for ours, theirs in zip(result[rows], exchanged[rows], strict=True):
            for difference in DIFFERENCES:
                found = ours["differences"][difference.name]
                opposite = theirs["differences"][swapped_name(difference.name)]
                if found is None:
                    assert opposite is None
                    continue
                assert found["value"] == -opposite["value"]
                if found["low"] is None:  # too few prompts
                    assert opposite["low"] is opposite["high"] is None
                    continue
                assert found["low"] == -opposite["high"]
                assert found["high"] == -opposite["low"]
                signs += found["value"] != 0
    assert signs > 20
    for ours, theirs in zip(result["cells"], exchanged["cells"], strict=True):
        one, other = ours["drift"], theirs["drift"]
        assert one["nll_difference"]["value"] == -other["nll_difference"]["value"]
        assert one["flip_rate"] == other["flip_rate"]


def test_stored_texts_are_read_again(
    folder: Path, bundles: dict[str, Path], prompts: Path, result: dict[str, Any]
) -> None:
    again = run_compare(
        bundles["bundle"], "--reference", bundles["reference"], "--prompts", prompts, *FAST,
        "--paths", folder / "out" / "compare.json", "--out", folder / "again",
    )  # fmt: skip
    assert again["prompts"] == result["prompts"]
    assert again["cells"] == result["cells"]


def test_a_limit_that_is_passed_names_its_cells_and_exits_1(
    folder: Path, bundles: dict[str, Path], prompts: Path, result: dict[str, Any]
) -> None:
    arguments = (
        bundles["bundle"], "--reference", bundles["reference"], "--prompts", prompts, *FAST,
        "--out", folder / "out",
    )  # fmt: skip
    changes = {(c["temperature"], c["category"]): c["differences"]["both"] for c in result["cells"]}
    limit = sorted(-change["value"] for change in changes.values())[len(changes) // 2]
    error = failed_compare(*arguments, "--max-acceptance-drop", limit)
    for (temperature, category), change in changes.items():
        judged = category == "all" or (change["high"] is not None and change["high"] < 0)
        named = f"acceptance at temperature {temperature}, category {category} changed" in error
        assert named == (judged and -change["value"] > limit)
    assert "KL at" not in error
    assert "KL at temperature all, category all" in failed_compare(*arguments, "--max-kl", "0.001")
    run_compare(*arguments, "--max-kl", "9", "--max-acceptance-drop", "1")


def test_an_interrupted_comparison_goes_on_where_it_stopped(
    folder: Path, bundles: dict[str, Path], prompts: Path, result: dict[str, Any]
) -> None:
    out = folder / "interrupted"
    out.mkdir()
    lines = (folder / "out" / "work.jsonl").read_text().splitlines(keepends=True)
    kept = lines[:4]
    altered_record = json.loads(kept[2]) | {"category": "marked"}
    kept[2] = json.dumps(altered_record) + "\n"
    (out / "work.jsonl").write_text("".join(kept) + lines[4][:50])
    resumed = run_compare(
        bundles["bundle"], "--reference", bundles["reference"], "--prompts", prompts, *FAST,
        "--out", out,
    )  # fmt: skip
    assert {c["category"] for c in resumed["cells"]} == {"all", "a", "b", "marked"}
    finished = (out / "work.jsonl").read_text().splitlines(keepends=True)
    assert finished[0] == lines[0]  # the rest comes in any order
    assert sorted(finished) == sorted([*lines[:2], kept[2], *lines[3:]])


def test_other_settings_do_not_take_the_records_of_these(
    folder: Path, bundles: dict[str, Path], prompts: Path
) -> None:
    out = folder / "reseeded"
    first = ("--prompts", prompts, "--tokens", "8", "--temperatures", "1", "-k", "2")
    arguments = (bundles["bundle"], "--reference", bundles["reference"], *first, "--out", out)
    texts = [run_compare(*arguments, "--seed", seed)["prompts"] for seed in (1, 2, 1)]
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]
    asked = prompts.read_text()
    changed = folder / "changed.jsonl"
    changed.write_text(asked.replace("text", "word"))
    again = (bundles["bundle"], "--reference", bundles["reference"], "--prompts", changed)
    other = run_compare(*again, *first[2:], "--out", out, "--seed", 1)["prompts"]
    assert [p["paths"] for p in other] != [p["paths"] for p in texts[2]]


def test_another_tokenizer_is_refused(
    folder: Path, bundles: dict[str, Path], prompts: Path
) -> None:
    def change(path: Path) -> None:
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"] = {
            {"a": "b", "b": "a"}.get(t, t): i for t, i in tokenizer["model"]["vocab"].items()
        }
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))

    other = altered(bundles["bundle"], folder / "tokenizer", change)
    error = failed_compare(other, "--reference", bundles["reference"], "--prompts", prompts)
    assert "Expected the same tokenizer" in error


def test_another_vocabulary_is_refused(folder: Path, bundles: dict[str, Path]) -> None:
    def change(path: Path) -> None:
        tokenizer = (bundles["reference"] / "tokenizer.json").read_bytes()
        (path / "tokenizer.json").write_bytes(tokenizer)

    table = target_table(VOCAB + 4)
    longer = write_bundle(folder / "longer", table, table)
    longer = altered(longer, folder / "vocabulary", change)
    error = failed_compare(longer, "--reference", bundles["reference"])
    assert f"received {VOCAB + 4} tokens" in error


def test_too_little_text_is_refused(folder: Path, bundles: dict[str, Path]) -> None:
    few = write_prompts(folder / "few.jsonl", count=3)
    rows = [json.dumps({"prompt": "long " * 40, "id": f"l{i}"}) + "\n" for i in range(3)]
    few.write_text(few.read_text() + "".join(rows))
    error = failed_compare(
        bundles["bundle"], "--reference", bundles["reference"], "--prompts", few, *FAST
    )
    assert "received 3 prompts of 1 to 78 tokens, of 6. Expected at least 4" in error


@pytest.mark.parametrize("graph", ["target", "draft"])
def test_logits_that_are_not_finite_name_the_graph(
    folder: Path, bundles: dict[str, Path], prompts: Path, graph: str
) -> None:
    table = {"target": NEAR_TARGET, "draft": NEAR_DRAFT}[graph].copy()
    table[3:, 7] = np.nan
    tables = {"target": NEAR_TARGET, "draft": NEAR_DRAFT, graph: table}
    broken = write_bundle(folder / f"nan-{graph}", tables["target"], tables["draft"])
    error = failed_compare(
        broken, "--reference", bundles["reference"], "--prompts", prompts, *FAST,
        "--out", folder / f"nan-{graph}-out",
    )  # fmt: skip
    assert f"nan-{graph}: {graph}: received" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-k", "9"), "Expected at most 4"),
        (("-k", "0"), "-k: received 0"),
        (("--temperatures", "0,x"), "numbers with commas"),
        (("--temperatures", "1,1"), "each one once"),
        (("--temperatures", "-1"), "at least 0"),
        (("--temperatures", "nan"), "finite"),
        (("--tokens", "2"), "at least one a temperature"),
        (("--tokens", "900"), "at most"),
        (("--rounds", "0"), "--rounds: received 0"),
        (("--reference", "nowhere"), "--reference-draft"),
        (("--paths", "nowhere.json"), "compare.json of an earlier"),
    ],
)
def test_bad_input_is_one_clear_line(
    folder: Path, bundles: dict[str, Path], prompts: Path, arguments: tuple[str, ...], said: str
) -> None:
    error = failed_compare(
        bundles["bundle"], "--reference", bundles["reference"], "--prompts", prompts,
        "--out", folder / "bad", "--cache", folder / "cache", *arguments,
    )  # fmt: skip
    (line,) = [line for line in error.splitlines() if line.startswith("error:")]
    assert said in line


def test_stored_texts_of_other_lengths_are_refused(
    folder: Path, bundles: dict[str, Path], prompts: Path, result: dict[str, Any]
) -> None:
    assert result["settings"]["path_tokens"] == 12
    error = failed_compare(
        bundles["bundle"], "--reference", bundles["reference"], "--prompts", prompts,
        "--tokens", "20", "--paths", folder / "out" / "compare.json", "--out", folder / "bad",
    )  # fmt: skip
    assert "Expected the same --tokens" in error
