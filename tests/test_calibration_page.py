"""The report's page: figures in it are the result's, and a real browser draws them to scale."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers_calibration import FAST, run_compare, write_prompts, write_tables

from calibration.comparison.page import render

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

# Runs in the page: what was drawn, in pixels, with the figure that each mark carries.
PROBE = """<pre id="probe"></pre><script>
const marks = [...document.querySelectorAll("svg [data-value]")].map(mark => {
  const box = mark.getBoundingClientRect();
  return {plot: mark.closest("svg").id, tag: mark.tagName, series: mark.dataset.series,
          label: mark.dataset.label, value: Number(mark.dataset.value),
          top: box.top, bottom: box.bottom, width: box.width};
});
const result = JSON.parse(document.getElementById("result").textContent);
const said = document.getElementById("recommendation").innerText;
document.getElementById("probe").textContent =
  JSON.stringify({marks, said, categories: result.cells.length});
</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    bundles = write_tables(folder)
    prompts = write_prompts(folder / "prompts.jsonl", count=4)
    found = run_compare(
        bundles["bundle"], "--reference", bundles["reference"], "--prompts", prompts, *FAST,
        "--out", folder / "out",
    )  # fmt: skip
    layers = [
        {"name": f"layers.{i}.mlp", "group": str(i), "kl": kl, "weight_error": 0.1}
        for i, kl in enumerate((0.001, 0.004, 0.002))
    ]
    found["layers"] = {"tokens": 8, "layers": layers, "skipped": ""}
    found["draft_layers"] = {"tokens": 8, "layers": layers[:2], "skipped": ""}
    return found


def test_the_page_needs_nothing_else_and_holds_the_result(
    folder: Path, result: dict[str, Any]
) -> None:
    page = (folder / "out" / "compare.html").read_text()
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://", page.split("<script")[0])
    (data,) = re.findall(r'<script type="application/json" id="result">(.*?)</script>', page, re.S)
    written = json.loads((folder / "out" / "compare.json").read_text())
    assert json.loads(data) == written


def test_texts_from_outside_are_only_text(result: dict[str, Any]) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    cells = [{**cell, "category": evil} for cell in result["cells"] if cell["category"] == "a"]
    kept = [cell for cell in result["cells"] if cell["category"] == "all"]
    page = render({**result, "cells": [*kept, *cells]})
    assert "<img" not in page.split("<script")[0]
    assert page.count("</script>") == 1


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_draws_the_figures_to_scale(folder: Path, result: dict[str, Any]) -> None:
    page = folder / "probe.html"
    page.write_text(render(result).replace("</body>", PROBE + "</body>"))
    data = f"--user-data-dir={folder / 'browser'}"
    done = subprocess.run(
        [str(BROWSER), *FLAGS, data, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    (text,) = re.findall(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    seen = json.loads(html.unescape(text))
    assert seen["said"] == result["recommendation"]
    assert seen["categories"] == len(result["cells"])
    check_positions(seen["marks"], result)
    check_bars([m for m in seen["marks"] if m["plot"] == "layers"], [0.001, 0.004, 0.002])
    check_bars([m for m in seen["marks"] if m["plot"] == "draft-layers"], [0.001, 0.004])
    drawn = [m for m in seen["marks"] if m["plot"] == "category-all"]
    values = [c for c in result["cells"] if c["temperature"] == "all"]
    found = {(m["label"], m["series"]): m["value"] for m in drawn}
    for cell in values:
        for key, value in cell["acceptance"].items():
            assert found[cell["category"], key.replace("+", " × ")] == value["value"]


def check_positions(marks: list[dict[str, Any]], result: dict[str, Any]) -> None:
    for row in result["positions"]:
        for key, found in row["acceptance"].items():
            (mark,) = [
                m
                for m in marks
                if m["plot"] == f"position-{row['temperature']}"
                and (m["label"], m["series"]) == (str(row["position"]), key.replace("+", " × "))
            ] or [None]
            if found is None:
                assert mark is None
            else:
                assert mark["value"] == found["value"]
                assert mark["width"] > 3


def check_bars(marks: list[dict[str, Any]], values: list[float]) -> None:
    """Heights in pixels stand to each other as the figures do, and all bars on one line."""
    assert [m["value"] for m in marks] == values
    heights = [m["bottom"] - m["top"] for m in marks]
    assert min(heights) > 10
    for height, value in zip(heights, values, strict=True):
        assert height / heights[0] == pytest.approx(value / values[0], rel=0.02)
    assert max(m["bottom"] for m in marks) - min(m["bottom"] for m in marks) < 0.5
