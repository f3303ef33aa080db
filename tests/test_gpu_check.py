"""The GPU check rehearsed on the CPU: its steps tell right from wrong, and it goes on after one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from export.gate_graph import DraftGateGraph, GateGraph
from export.oracle import record
from runtime.bundle import Bundle
from runtime.oracle import Oracle
from scripts.gpu import steps
from scripts.gpu.check import readable, run_step
from scripts.gpu.large import by_acceptance, expected_length
from scripts.gpu.steps import STEPS, Check

TOKENS = [3 + (11 * i) % 50 for i in range(20)]
ON_A_GPU = {
    "machine", "plans", "aliasing", "bandwidth", "second start", "onnxruntime-cuda", "large",
    "trees",
}  # fmt: skip


@pytest.fixture(scope="module")
def rehearsed(fp32_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of ONNX graphs with an oracle, as a bundle of engines has."""
    path = shutil.copytree(fp32_bundle, tmp_path_factory.mktemp("gpu") / "bundle")
    bundle = Bundle.load(path)
    manifest, onnx = bundle.manifest, path / "onnx"
    assert manifest.draft_model is not None
    size = manifest.draft_vocab_size
    target = GateGraph(onnx / "target.onnx", manifest.target.cache, manifest.target.vocab_size)
    draft = DraftGateGraph(onnx / "draft.onnx", manifest.draft_model.cache, size)
    record(
        path,
        onnx / "accept.onnx",
        tokens=TOKENS,
        logits=target.in_chunks(TOKENS),
        draft_probs=draft.probs(TOKENS),
        d2t=bundle.d2t,
        draft_vocab=size,
        max_draft_tokens=manifest.limits.max_draft_tokens,
    )
    return path


@pytest.fixture
def check(rehearsed: Path) -> Iterator[Check]:
    made = Check(path=rehearsed)
    yield made
    made.close()


def test_every_step_that_needs_no_gpu_passes(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ROUNDS", 40)
    monkeypatch.setattr(steps, "REPEATS", 2)
    monkeypatch.setattr(steps, "CONTEXTS", (32, 4096))
    results = {name: run_step(name, check, time.monotonic() + 300) for name in STEPS}
    for name, found in results.items():
        if name not in ON_A_GPU:
            assert found["status"] == "passed", (name, found)
    assert results["captured"]["figures"]["rounds"] == 40
    assert results["captured"]["figures"]["accepted"] > 0
    assert results["captured"]["figures"]["cache_error"] < 1e-4
    assert results["times"]["figures"]["context 32"]["captured round 4"] > 0
    assert results["target"]["figures"]["relative_error"] < 1e-3
    assert results["accept"]["figures"]["accepted"] > 0
    report = readable(check.path, results)
    for name in STEPS:
        assert f"## {name}: " in report


@pytest.mark.parametrize(
    ("step", "change"),
    [
        ("target", {"logits": 1.1}),
        ("verification", {"logits": 1.1}),
        ("draft", {"draft_probs": 1.2}),
        ("accept", {"next_token": 2}),
        ("accept", {"num_accepted": 2}),
    ],
)
def test_a_step_finds_what_is_wrong(
    rehearsed: Path, tmp_path: Path, step: str, change: dict[str, float]
) -> None:
    path = shutil.copytree(rehearsed, tmp_path / "bundle")
    oracle = Oracle.load(path)
    for name, factor in change.items():
        value = getattr(oracle, name)
        oracle = replace(oracle, **{name: (value * factor).astype(value.dtype)})  # type: ignore[arg-type]
    oracle.save(path)
    check = Check(path=path)
    found = run_step(step, check, time.monotonic() + 60)
    assert found["status"] == "failed"
    assert found["reason"].startswith("Failed: ")
    check.close()


def test_a_round_that_differs_is_found(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured round whose uniforms stayed those of another position."""
    from runtime.captured_round import RoundInputs

    real = RoundInputs.fill

    def fill(self, arena, k, vocab):  # type: ignore[no-untyped-def]
        real(self, arena, k, vocab)
        arena["draw_uniforms"][:] = 0.5

    monkeypatch.setattr(steps, "ROUNDS", 40)
    monkeypatch.setattr(RoundInputs, "fill", fill)
    found = run_step("captured", check, time.monotonic() + 60)
    assert found["status"] == "failed"
    assert "round" in found["reason"]


def test_what_times_make_of_an_acceptance() -> None:
    ms = {
        "verify 1": 9.0,
        "accept 0": 1.0,
        "verify 5": 10.0,
        "captured round 4": 12.0,
        "draft 1": 1,
    }
    found = by_acceptance(ms)
    assert found["plain"] == pytest.approx(100)
    assert found["acceptance 0.5"] == {"k = 4": "161.5 (1.61 x)"}  # 1.9375 tokens in 12 ms
    assert expected_length(0.8, 0) == 1
    assert expected_length(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_length(1.0, 4) == 5


def test_out_of_time_no_step_begins(check: Check) -> None:
    found = run_step("opening", check, time.monotonic() - 1)
    assert (found["status"], found["reason"]) == ("skipped", "out of time")


def test_it_goes_on_after_a_step_that_fails(rehearsed: Path, tmp_path: Path, root: Path) -> None:
    """A bundle without an oracle: what needs one fails, all else is reported."""
    path = shutil.copytree(rehearsed, tmp_path / "bundle")
    shutil.rmtree(path / "reports")
    out = tmp_path / "reports"
    arguments = [str(root / "scripts" / "gpu_check"), str(path), "--out", str(out)]
    done = subprocess.run(
        arguments,
        env={"PATH": "/usr/bin:/bin", "OUTRIDER_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    results = json.loads((out / "bundle.json").read_text())
    assert done.returncode == 1, done.stderr
    assert list(results) == list(STEPS)
    assert results["target"]["status"] == "failed"
    assert "rebuild the bundle" in results["target"]["reason"]
    assert results["captured"]["status"] == "passed"
    assert "## captured: passed" in (out / "bundle.md").read_text()


def test_what_is_no_bundle_is_told_before_anything_runs(tmp_path: Path, root: Path) -> None:
    out = tmp_path / "reports"
    arguments = [str(root / "scripts" / "gpu_check"), str(tmp_path / "no"), "--out", str(out)]
    env = {"PATH": "/usr/bin:/bin", "OUTRIDER_PYTHON": sys.executable}
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "no: received no bundle. Expected" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("wheels", [["no"], ["empty"], []], ids=["missing", "empty", "unnamed"])
def test_a_folder_without_wheels_is_told(
    rehearsed: Path, tmp_path: Path, root: Path, wheels: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    arguments = [str(root / "scripts" / "gpu_check"), str(rehearsed), "--wheels", *wheels]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"--wheels: received '{''.join(wheels)}', which holds no wheels." in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_oracle_cases_have_both_ends() -> None:
    """Greedy and sampled, accepted and rejected, from seeds alone."""
    from runtime.oracle import CASES, accept_case

    cases = [accept_case(i, 4, 64, np.arange(0, 64, 2)) for i in range(CASES)]
    again = accept_case(5, 4, 64, np.arange(0, 64, 2))
    assert np.array_equal(again.logits, cases[5].logits)
    assert {case.k for case in cases} == {1, 2, 3, 4}
    assert {case.temperature for case in cases} == {0.0, 0.7, 1.0}
    for case in cases:
        np.testing.assert_allclose(case.draft_probs.sum(-1), 1, atol=1e-5)
        assert (case.draft_tokens % 2 == 0).all()
