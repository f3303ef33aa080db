"""Bundles of EAGLE and Medusa heads, by the real build, from files in every published layout.

The weights are random, so that nothing is drafted well; what counts is that each graph computes
the eager head (the gates), that the target's states are the right ones, and that the text stays
the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import VOCAB, llama_config, save
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

from export import build as build_module
from export import graphs
from export.build import BuildRequest, build
from export.certificates.contract import certify
from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle
from runtime.errors import GateFailed
from runtime.manifest import EagleDraft, NgramPlusDraft

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


@pytest.mark.parametrize(
    ("layout", "weights"),
    [(LAYOUTS[0], "fp32"), (LAYOUTS[1], "int4"), *((layout, "int8") for layout in LAYOUTS)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
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
            drafted = decoder.generate(PROMPT, params, num_draft_tokens=2)
            assert drafted.stats.num_draft_tokens > 0
        plain = decoder.generate(PROMPT, SamplingParams(max_tokens=24), num_draft_tokens=0)
        drafted = decoder.generate(PROMPT, SamplingParams(max_tokens=24), num_draft_tokens=2)
    assert drafted.token_ids == plain.token_ids


def test_a_lookup_before_a_head(kept_traces: None, target: Path, tmp_path: Path) -> None:
    """q is over the target's vocabulary then, though the head knows some tokens alone."""
    head = tmp_path / "head"
    head.mkdir()
    write_head(head, LAYOUTS[0].config, LAYOUTS[0].state(), LAYOUTS[0].file)
    request = BuildRequest(
        target=str(target),
        draft=f"ngram+{head}",
        out=tmp_path / "bundle",
        precision="fp32",
        max_context=CONTEXT,
        max_draft_tokens=4,
    )
    bundle = Bundle.load(build(request))
    assert bundle.manifest.draft_vocab_size == VOCAB
    assert isinstance(bundle.manifest.draft, NgramPlusDraft)
    assert isinstance(bundle.manifest.draft.other, EagleDraft)
    assert certify(bundle).status == "passed"
    with Decoder.load(bundle.path, threads=1) as decoder:
        params = SamplingParams(max_tokens=24)
        plain = decoder.generate(PROMPT * 2, params, num_draft_tokens=0)
        drafted = decoder.generate(PROMPT * 2, params, num_draft_tokens=3)
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("off", [-1, 1])
def test_a_tap_that_is_off_by_one_fails_the_gate(
    kept_traces: None, target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, off: int
) -> None:
    """The planted fault: the traced graph takes the neighbour's state."""
    head = tmp_path / "head"
    head.mkdir()
    write_head(head, LAYOUTS[0].config, LAYOUTS[0].state(), LAYOUTS[0].file)
    made = graphs.trace_decoder

    def shifted(*args: Any, taps: tuple[int, ...] = (), **options: Any) -> Any:
        return made(*args, taps=tuple(tap + off for tap in taps), **options)

    monkeypatch.setattr(graphs, "trace_decoder", shifted)
    request = BuildRequest(
        target=str(target),
        draft=str(head),
        out=tmp_path / "bundle",
        precision="fp32",
        max_context=CONTEXT,
    )
    with pytest.raises(GateFailed, match=r"gate features: state [234]"):
        build(request)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_draft_that_fits_nothing_is_told(
    kept_traces: None,
    target: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What no file shows."""
    monkeypatch.setattr(build_module, "measure", lambda *_: {"acceptance": 0.0})
    with caplog.at_level(logging.WARNING):
        bundle = built(LAYOUTS[0], target, tmp_path, "int8")
    (warning,) = [r.getMessage() for r in caplog.records if "first drafts" in r.getMessage()]
    assert "0 % of first drafts" in warning
    assert "states [" in warning
    assert bundle.manifest.draft is not None
    assert bundle.manifest.draft.name in warning
