"""`build --gate`: a bundle beyond its limits gets no name, one within them tells by how much."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_build import K
from helpers_calibration import write_prompts
from typer.testing import CliRunner

from calibration.comparison.limits import Limits
from export.build import BuildRequest, build
from export.cli import app
from export.fidelity_gate import FidelityGate
from runtime.bundle import Bundle
from runtime.errors import GateFailed

WIDE = Limits(max_acceptance_drop=1.0, max_kl=100.0)


@pytest.fixture
def request_with_gate(
    kept_traces: None, fp32_bundle: Path, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> BuildRequest:
    gate = FidelityGate(
        reference=str(fp32_bundle),
        limits=WIDE,
        prompt_files=(write_prompts(tmp_path / "prompts.jsonl", 4),),
        tokens=9,
    )
    return BuildRequest(
        target=str(tiny_target),
        draft=str(tiny_draft),
        out=tmp_path / "out" / "bundle",
        precision="int4",
        max_draft_tokens=K,
        gate=gate,
    )


def test_within_the_limits_the_report_is_in_the_bundle(request_with_gate: BuildRequest) -> None:
    bundle = Bundle.load(build(request_with_gate))
    (gate,) = [g for g in bundle.manifest.gates if g.name == "fidelity"]
    assert gate.status == "passed"
    assert gate.figures["prompts"] == 4
    folder = bundle.path / "reports" / "fidelity"
    assert {path.name for path in folder.iterdir()} == {"compare.json", "compare.html"}
    report = json.loads((folder / "compare.json").read_text())
    found = {c["temperature"]: c for c in report["cells"] if c["category"] == "all"}
    assert gate.figures["kl_at_0.0"] == found[0.0]["drift"]["kl"]["value"] > 0
    change = found[1.0]["differences"]["both"]["value"]
    assert gate.figures["acceptance_change_at_1.0"] == change


def test_where_drafts_have_no_acceptance_to_compare_the_target_is_judged(
    request_with_gate: BuildRequest,
) -> None:
    bundle = Bundle.load(build(replace(request_with_gate, draft="ngram", draft_precision=None)))
    (gate,) = [g for g in bundle.manifest.gates if g.name == "fidelity"]
    assert gate.status == "passed"
    assert {"kl_at_0.0", "kl_at_1.0"} <= gate.figures.keys()
    assert not any("acceptance" in name for name in gate.figures)
    assert request_with_gate.gate is not None
    strict = replace(request_with_gate.gate, limits=Limits(max_kl=0.0))
    with pytest.raises(GateFailed, match="KL at temperature"):
        other = replace(request_with_gate, out=bundle.path.parent / "strict")
        build(replace(other, draft="ngram", draft_precision=None, gate=strict))


def test_beyond_a_limit_nothing_is_left(request_with_gate: BuildRequest) -> None:
    assert request_with_gate.gate is not None
    strict = replace(request_with_gate.gate, limits=Limits(max_kl=0.0))
    with pytest.raises(GateFailed, match=r"KL at temperature 0(\.0)?, category all"):
        build(replace(request_with_gate, gate=strict))
    assert list(request_with_gate.out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-kl", "0.1"], "--max-kl: received it without --gate"),
        (["--gate-reference", "x"], "--gate-reference: received it without --gate"),
        (["--gate", "--max-acceptance-drop", "0.1"], "received it with --draft none"),
        (
            ["--gate", "--max-acceptance-drop", "0.1", "--draft", "ngram"],
            "received it with --draft ngram",
        ),
        (["--gate", "--max-kl", "-1"], "--max-kl: received -1"),
    ],
)
def test_wrong_options(tiny_target: Path, tmp_path: Path, options: list[str], message: str) -> None:
    out = tmp_path / "bundle"
    done = CliRunner().invoke(
        app, ["build", "--target", str(tiny_target), "--out", str(out), *options]
    )
    assert done.exit_code == 1
    assert message in done.stderr
    assert not out.exists()
