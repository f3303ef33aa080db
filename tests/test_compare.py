"""The side-by-side example: what a new user reads is what the runs gave."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT
from helpers_runtime import VOCAB, latency_report, near_table, target_table, write_bundle

from runtime.latency import LatencyProfile
from runtime.stats import Stats


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "examples" / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module
    spec.loader.exec_module(module)
    return module


compare = _loaded()


def run_on(
    path: Path, row: float, draft: float, capsys: pytest.CaptureFixture[str]
) -> dict[str, list[str]]:
    """The table of one comparison, by the row's name; `text` holds all that was printed."""
    table = target_table(VOCAB)
    latency = latency_report(row=row, draft=draft)
    bundle = write_bundle(path, table, near_table(table, 0.5), context=128, latency=latency)
    compare.main([str(bundle), "Once", "--max-tokens", "40", "--repeats", "1"])
    printed = capsys.readouterr().out
    cells = [line.strip("│ ").split("│") for line in printed.splitlines() if line.startswith("│")]
    found = {row[0].strip(): [c.strip() for c in row[1:]] for row in cells if len(row) == 4}
    return found | {"text": [" ".join(printed.split())]}


def test_drafting_is_shown_where_the_runtime_declines_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second row as dear as a step: nothing to gain, and the sentence says so."""
    found = run_on(tmp_path / "dear", row=1.0, draft=0.5, capsys=capsys)
    plain, chosen, fixed = map(int, found["drafted"])
    assert plain == 0
    assert chosen <= 2 < fixed
    assert found["of those accepted"][0] == "–"
    assert found["of those accepted"][2] != "–"
    assert "no share of accepted drafts would do" in found["text"][0]


def test_the_runtime_drafts_where_it_pays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_on(tmp_path / "cheap", row=0.01, draft=0.01, capsys=capsys)
    plain, chosen, fixed = map(int, found["drafted"])
    assert plain == 0
    assert min(chosen, fixed) > 5
    per_call = [float(cell) for cell in found["tokens a target call"]]
    assert per_call[0] == 1.0
    assert min(per_call[1:]) > 1.0
    assert "drafting gains where more than 2 % of drafts are accepted" in found["text"][0]


def test_a_bundle_without_a_draft_only_shows_plain_decoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_bundle(tmp_path / "plain", target_table(VOCAB), None, context=128)
    compare.main([str(bundle), "Once", "--max-tokens", "8", "--repeats", "1"])
    printed = capsys.readouterr().out
    assert "plain" in printed
    assert "k = 1" not in printed


def test_the_break_even_share_is_where_a_round_gains_nothing() -> None:
    """At that acceptance, one draft a round commits as many tokens a second as none."""
    profile = LatencyProfile(
        verify_s={1: 1.0, 2: 1.3}, accept_s={0: 0.0, 1: 0.1}, draft_s=0.2, draft_catch_up_s=0.25,
        overhead_s=0.0, acceptance=0.5,
    )  # fmt: skip
    stats = Stats(seed=0, max_draft_tokens=1, max_context=10, num_prompt_tokens=1)
    share = (1.6 - 1.0) / (1.0 - 0.05)
    seconds = profile.round_s(1) + share * profile.read_s(2)
    assert seconds / (1 + share) == pytest.approx(profile.round_s(0))
    text = compare.choice(profile, stats, stats)
    assert f"more than {100 * share:.0f} % of drafts" in text
    assert "costs\nthe target 0.40 of a step and drafting it 0.20" in text
    assert "measured 50 %, this text gave –" in text


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [((1, 2), (1, 2), None), ((1, 2, 3), (1, 4, 3), 1), ((1,), (1, 2), 1), ((), (), None)],
)
def test_parting(first: tuple[int, ...], second: tuple[int, ...], at: int | None) -> None:
    assert compare.parting(first, second) == at
