"""Heads read the target's states, so each of the four pairs drafts for itself."""

from __future__ import annotations

from dataclasses import replace
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
    failed_compare,
    run_compare,
    write_prompts,
    write_tables,
)
from helpers_eagle import write_eagle_bundle
from helpers_medusa import write_medusa_bundle
from helpers_runtime import STATES, VOCAB, latency_report, logits_after, write_bundle

from calibration.comparison.law import law
from calibration.comparison.sides import check_comparable
from runtime.bundle import Bundle
from runtime.errors import BundleError
from runtime.manifest import NgramDraft

TARGETS = {"reference": TARGET, "bundle": NEAR_TARGET}
HEADS = 2  # of Medusa: fewer than the comparison drafts
KINDS = pytest.mark.parametrize("kind", ["eagle", "medusa"])


def medusa_tables(seed: int) -> np.ndarray:
    """[STATES, HEADS, VOCAB]: likely what the target says, at places that it doesn't know."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((STATES, HEADS, VOCAB)) * 2).astype(np.float32)


MEDUSA = {"reference": medusa_tables(1), "bundle": medusa_tables(2)}
EAGLE = {"reference": DRAFT, "bundle": NEAR_DRAFT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Path:
    return write_prompts(folder / "prompts.jsonl", count=4)


@pytest.fixture(scope="module")
def bundles(folder: Path) -> dict[tuple[str, str], Path]:
    made = {}
    for name, table in TARGETS.items():
        eagle = folder / f"eagle-{name}"
        made["eagle", name] = write_eagle_bundle(eagle, table, EAGLE[name], turn=0.0)
        medusa = folder / f"medusa-{name}"
        made["medusa", name] = write_medusa_bundle(medusa, table, MEDUSA[name])
    return made


def first_q(kind: str, name: str, tokens: list[int], temperature: float) -> np.ndarray:
    """What the head says behind `tokens`, in NumPy."""
    if kind == "eagle":
        return law(logits_after(EAGLE[name], tokens), temperature)
    weights = np.arange(len(tokens) - 1) * 3 % 11 + 1
    return law(MEDUSA[name][int(np.dot(tokens[:-1], weights)) % STATES, 0], temperature)


@KINDS
def test_acceptance_is_the_overlap_along_the_stored_text(
    folder: Path, bundles: dict[tuple[str, str], Path], prompts: Path, kind: str
) -> None:
    result = run_compare(
        bundles[kind, "bundle"], "--reference", bundles[kind, "reference"], "--prompts", prompts,
        *FAST, "--out", folder / f"out-{kind}",
    )  # fmt: skip
    for cell in (c for c in result["cells"] if c["category"] == "all"):
        if cell["temperature"] == "all":
            continue
        for key, found in cell["acceptance"].items():
            target, draft = key.split("+")
            overlaps = []
            for prompt in result["prompts"]:
                text = prompt["paths"][repr(cell["temperature"])]
                for i in range(len(text)):
                    tokens = [*prompt["tokens"], *text[:i]]
                    p = law(logits_after(TARGETS[target], tokens), cell["temperature"])
                    q = first_q(kind, draft, tokens, cell["temperature"])
                    overlaps.append(np.minimum(p, q).sum())
            assert found["value"] == pytest.approx(np.mean(overlaps), abs=1e-6)
    assert result["draft_layers"]["skipped"]


@KINDS
def test_a_bundle_compared_with_itself_differs_by_exactly_nothing(
    folder: Path, bundles: dict[tuple[str, str], Path], prompts: Path, kind: str
) -> None:
    bundle = bundles[kind, "bundle"]
    same = run_compare(
        bundle, "--reference", bundle, "--prompts", prompts, *FAST, "--max-acceptance-drop", "0",
        "--max-kl", "0", "--out", folder / f"itself-{kind}",
    )  # fmt: skip
    for row in (*same["cells"], *same["positions"], *same["lengths"]):
        for found in row["differences"].values():
            assert found is None or set(found.values()) <= {0.0, None}
    assert same["findings"] == []


def test_fewer_heads_than_drafts_leave_the_later_positions_empty(
    folder: Path, bundles: dict[tuple[str, str], Path], prompts: Path
) -> None:
    bundle = bundles["medusa", "bundle"]
    result = run_compare(
        bundle, "--reference", bundle, "--prompts", prompts, *FAST, "--out", folder / "fewer"
    )
    evaluated = {
        row["position"]: row["evaluated"]["bundle+bundle"]
        for row in result["positions"]
        if row["temperature"] == "all"
    }
    assert evaluated[1] > 0
    assert evaluated[HEADS + 1] == 0


def drift_alone(
    folder: Path, prompts: Path, bundle: Path, reference: Path, *options: str
) -> tuple[dict[str, Any], str]:
    """The result, and the reason why drafts were left out."""
    out = folder / f"drift-{bundle.name}-{reference.name}"
    result = run_compare(
        bundle, "--reference", reference, "--prompts", prompts, *FAST, "--out", out, *options
    )
    assert result["positions"] == result["lengths"] == []
    for cell in result["cells"]:
        assert set(cell["acceptance"].values()) == set(cell["differences"].values()) == {None}
        assert cell["drift"]["kl"]["value"] > 0
    (said,) = [text for text in result["findings"] if "not compared" in text]
    assert "position-" not in (out / "compare.html").read_text()
    return result, said


def test_drafts_that_read_something_else_leave_the_target_s_drift(
    folder: Path, bundles: dict[tuple[str, str], Path], prompts: Path
) -> None:
    models = write_tables(folder)
    _, said = drift_alone(folder, prompts, bundles["eagle", "bundle"], models["reference"])
    assert "layers 1" in said
    assert "tokens alone" in said
    medusa, eagle = bundles["medusa", "bundle"], bundles["eagle", "reference"]
    _, said = drift_alone(folder, prompts, medusa, eagle)
    assert "the target's last state" in said


def test_without_a_draft_model_the_drift_is_that_of_the_same_targets_with_one(
    folder: Path, prompts: Path
) -> None:
    models = write_tables(folder / "models")
    lookup = NgramDraft(min_ngram=2, max_ngram=4)
    latency = latency_report(row=0.2, draft=0.1)
    plain = {
        "reference": write_bundle(folder / "none", TARGET, None, latency=latency),
        "bundle": write_bundle(folder / "lookup", NEAR_TARGET, lookup, latency=latency),
    }
    with_drafts = run_compare(
        models["bundle"], "--reference", models["reference"], "--prompts", prompts, *FAST,
        "--out", folder / "with",
    )  # fmt: skip
    result, said = drift_alone(
        folder, prompts, plain["bundle"], plain["reference"], "--max-kl", "100"
    )
    assert "lookup drafts by n-grams" in said
    drifts = [[c["drift"]["kl"]["value"] for c in r["cells"]] for r in (result, with_drafts)]
    assert drifts[0] == drifts[1]
    assert "acceptance" not in result["recommendation"]
    assert "tokens/s by the latency profiles without speculation" in result["recommendation"]


def test_a_bundle_for_gpus_is_refused(bundles: dict[tuple[str, str], Path]) -> None:
    ours = Bundle.load(bundles["eagle", "bundle"])
    gpu = replace(ours, manifest=replace(ours.manifest, backend="tensorrt-rtx"))
    with pytest.raises(BundleError, match="Expected one of --backend onnxruntime"):
        check_comparable(ours, gpu)


def test_a_limit_of_what_is_not_compared_is_refused(folder: Path, prompts: Path) -> None:
    bundle = write_bundle(folder / "alone", TARGET, None)
    error = failed_compare(
        bundle, "--reference", bundle, "--prompts", prompts, "--max-acceptance-drop", "0.1",
        "--out", folder / "refused",
    )  # fmt: skip
    (line,) = [line for line in error.splitlines() if line.startswith("error:")]
    assert "--max-acceptance-drop: received 0.1 where alone drafts by nothing" in line
    assert not (folder / "refused").exists()
