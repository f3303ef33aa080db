"""The accept graph and the draft's sampling tail parse and build with TensorRT-RTX, without a GPU.

Needs the `tensorrt-rtx` extra; an engine is built for three compute capabilities, never run here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.external_data import WeightStore, save
from engines.tensorrt.build import BuildOptions, build_plan
from engines.tensorrt.package import load
from engines.tensorrt.ranges import accept_profiles, draft_profiles
from export.accept_graph import accept_model
from export.certificates.round_graphs import draft_tail_model
from runtime.manifest import Limits

pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)

VOCAB = 49_152
D2T = np.arange(0, VOCAB, 8) - np.arange(VOCAB // 8)
LIMITS = Limits(max_batch=4, max_context=1024, max_draft_tokens=8)


@pytest.mark.parametrize("graph", ["accept", "draft tail"])
def test_builds_for_every_target(graph: str, tmp_path: Path) -> None:
    if graph == "accept":
        model, profiles = accept_model(VOCAB, D2T), accept_profiles(LIMITS)
    else:
        model = draft_tail_model(len(D2T), D2T, VOCAB)
        profiles = draft_profiles(LIMITS, LIMITS.max_context)
    path = save(model, "graph", WeightStore(directory=tmp_path))
    options = BuildOptions(compute_capabilities=(80, 89, 120))
    plan = build_plan(load("tensorrt-rtx"), path, profiles, options)
    assert plan.data
    assert not plan.warnings
