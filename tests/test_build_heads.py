"""Bundles of EAGLE and Medusa heads, by the real build, from files in every published layout.

The weights are random, so that nothing is drafted well; what counts is that each graph computes
the eager head (the gates), that the target's states are the right ones, and that the text stays
the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import llama_config, save
from tiny_heads import (
    HIDDEN,
    State,
    eagle1_config,
    eagle1_state,
    eagle3_state,
    embedding,
    maps,
    medusa_state,
    published_config,
    speculators_config,
    vllm_medusa_state,
    write_head,
)

from export.build import BuildRequest, build
from export.certificates.contract import certify
from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle

LAYERS, CONTEXT = 7, 96
PROMPT = "the quick brown fox and the lazy dog"


@dataclass(frozen=True, kw_only=True)
class Layout:
    name: str
    config: dict[str, Any]
    state: Callable[[], State]
    file: str = "model.safetensors"


LAYOUTS = [
    Layout(
        name="EAGLE-3",
        config=published_config(),
        state=lambda: eagle3_state() | maps(),
    ),
    Layout(
        name="speculators",
        config=speculators_config(norm_before_residual=True),
        state=lambda: eagle3_state("layers.0.") | embedding() | maps(),
    ),
    Layout(name="EAGLE-1", config=eagle1_config(), state=eagle1_state),
    Layout(
        name="Medusa 1",
        config={"medusa_num_heads": 3, "medusa_num_layers": 1},
        state=medusa_state,
        file="medusa_lm_head.safetensors",
    ),
    Layout(
        name="Medusa 2",
        config={"medusa_num_heads": 3, "medusa_num_layers": 2, "version": "2"},
        state=lambda: medusa_state(layers=2, version=2),
        file="medusa_lm_head.safetensors",
    ),
    Layout(
        name="vLLM's Medusa",
        config={"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 2},
        state=vllm_medusa_state,
    ),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    save(directory, llama_config(hidden_size=HIDDEN, num_hidden_layers=LAYERS))
    return directory


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.name)
def layout(request: pytest.FixtureRequest) -> Layout:
    found: Layout = request.param
    return found


def built(layout: Layout, target: Path, place: Path, weights: str) -> Bundle:
    head = place / f"head-{weights}"
    head.mkdir()
    write_head(head, layout.config, layout.state(), layout.file)
    request = BuildRequest(
        target=str(target),
        draft=str(head),
        out=place / f"bundle-{weights}",
        precision=weights,
        max_context=CONTEXT,
        max_draft_tokens=4,
    )
    return Bundle.load(build(request))


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_bundle_of_each_layout(
    kept_traces: None, layout: Layout, target: Path, tmp_path: Path, weights: str
) -> None:
    bundle = built(layout, target, tmp_path, weights)
    gates = {gate.name: gate for gate in bundle.manifest.gates}
    assert {"draft parity", "features"} <= set(gates)
    assert all(gate.status == "passed" for gate in gates.values())
    certificate = certify(bundle)
    assert certificate.status == "passed", certificate.reason
    with Decoder.load(bundle.path, threads=1) as decoder:
        for params in (SamplingParams(max_tokens=24), SamplingParams(temperature=1, seed=3)):
            drafted = decoder.generate(PROMPT, params, num_draft_tokens=3)
            assert drafted.stats.num_draft_tokens > 0
        plain = decoder.generate(PROMPT, SamplingParams(max_tokens=24), num_draft_tokens=0)
        drafted = decoder.generate(PROMPT, SamplingParams(max_tokens=24), num_draft_tokens=3)
    assert drafted.token_ids == plain.token_ids
