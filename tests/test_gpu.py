"""On a GPU: a tiny bundle of engines through every step of the GPU check."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from export.build import BuildRequest, build
from runtime import Decoder, SamplingParams
from scripts.gpu.check import run_step
from scripts.gpu.steps import STEPS, Check

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["fp16", "int8"])
def engines(
    kept_traces: None,
    request: pytest.FixtureRequest,
    build_root: Path,
    tiny_target: Path,
    tiny_draft: Path,
) -> Path:
    asked = BuildRequest(
        target=str(tiny_target),
        draft=str(tiny_draft),
        out=build_root / f"gpu-{request.param}",
        backend="tensorrt-rtx",
        precision=request.param,
        max_draft_tokens=4,
    )
    return build(asked)


def test_every_step_of_the_check_passes(engines: Path) -> None:
    check = Check(path=engines)
    results = {name: run_step(name, check, time.monotonic() + 480) for name in STEPS}
    check.close()
    failed = {name: one["reason"] for name, one in results.items() if one["status"] == "failed"}
    assert not failed


def test_greedy_text_with_drafts_is_plain_greedy_text(engines: Path) -> None:
    with Decoder.load(engines) as decoder:
        params = SamplingParams(max_tokens=32)
        plain = decoder.generate("abc", params, num_draft_tokens=0)
        drafted = decoder.generate("abc", params, num_draft_tokens=4)
    assert drafted.token_ids == plain.token_ids
