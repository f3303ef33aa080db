"""Bundles of EAGLE and Medusa heads, by the real build, from files in every published layout.

The weights are random, so that nothing is drafted well; what counts is that each graph computes
the eager head (the gates), that the target's states are the right ones, and that the text stays
the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
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

from export.build import BuildRequest, _warn_of_acceptance, build
from export.certificates.contract import certify
from export.checkpoint import open_checkpoint
from export.gate_graph import GateGraph
from export.gates import exact_arithmetic, features_parity
from export.graphs import rounded_weights
from export.precision import precision
from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle
from runtime.errors import GateFailed
from runtime.manifest import EagleDraft, MedusaDraft, NgramDraft, NgramPlusDraft

LAYERS, CONTEXT = 7, 96
TAPS = (2, 3, 4)  # where nothing else is said
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


def built(layout: Layout, target: Path, place: Path, weights: str, draft: str = "{}") -> Bundle:
    """draft: what `--draft` is given, `{}` standing for the head's directory."""
    head = place / "head"
    head.mkdir()
    write_head(head, layout.config, layout.state(), layout.file)
    request = BuildRequest(
        target=str(target),
        draft=draft.format(head),
        out=place / "bundle",
        precision=weights,
        max_context=CONTEXT,
        max_draft_tokens=4,
    )
    return Bundle.load(build(request))


def by_name(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


@pytest.fixture(scope="module")
def eagle3(kept_traces: None, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return built(by_name("EAGLE-3"), target, tmp_path_factory.mktemp("eagle3"), "int8")


def check_bundle(bundle: Bundle) -> None:
    """Gates, certificate, and text that is the target's."""
    gates = {gate.name: gate for gate in bundle.manifest.gates}
    assert {"draft parity", "features"} <= set(gates)
    assert all(gate.status == "passed" for gate in gates.values())
    certificate = certify(bundle)
    assert certificate.status == "passed", certificate.reason
    greedy = SamplingParams(max_tokens=24)
    with Decoder.load(bundle.path, threads=1) as decoder:
        sampled = SamplingParams(temperature=1, seed=3, max_tokens=24)
        assert decoder.generate(PROMPT, sampled, num_draft_tokens=2).stats.num_draft_tokens > 0
        plain = decoder.generate(PROMPT, greedy, num_draft_tokens=0)
        drafted = decoder.generate(PROMPT, greedy, num_draft_tokens=2)
    assert drafted.stats.num_draft_tokens > 0
    assert drafted.token_ids == plain.token_ids


def test_a_bundle_of_an_eagle3_head(eagle3: Bundle) -> None:
    check_bundle(eagle3)


@pytest.mark.parametrize("name", ["EAGLE-1", "Medusa 2"])
def test_a_bundle_of_another_kind(
    kept_traces: None, target: Path, tmp_path: Path, name: str
) -> None:
    check_bundle(built(by_name(name), target, tmp_path, "int8"))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_bundle_of_each_layout(
    kept_traces: None, layout: Layout, target: Path, tmp_path: Path, weights: str
) -> None:
    check_bundle(built(layout, target, tmp_path, weights))


def test_a_lookup_before_a_head(kept_traces: None, target: Path, tmp_path: Path) -> None:
    """q is over the target's vocabulary then, though the head knows some tokens alone."""
    bundle = built(by_name("EAGLE-3"), target, tmp_path, "fp32", "ngram+{}")
    assert bundle.manifest.draft_vocab_size == VOCAB
    assert isinstance(bundle.manifest.draft, NgramPlusDraft)
    assert isinstance(bundle.manifest.draft.other, EagleDraft)
    check_bundle(bundle)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_tap_that_is_off_by_one_fails_the_gate(eagle3: Bundle, target: Path, off: int) -> None:
    """The planted fault: the graph's states are those of the neighbouring layers."""
    card, checkpoint = eagle3.manifest.target, open_checkpoint(target)
    path = eagle3.model_path("target")

    def judge() -> None:
        with exact_arithmetic(path) as variant:
            features_parity(
                GateGraph(variant, card.cache, card.vocab_size),
                checkpoint.load_eager,
                list(range(40, 60)),
                [tap + off for tap in TAPS],
                precision("int8"),
                rounded_weights(ir.load(path), checkpoint),
                needs_bytes=0,
            )

    if off == 0:
        judge()
        return
    with pytest.raises(GateFailed, match=r"gate features: state [12345]"):
        judge()


def test_a_draft_that_fits_nothing_is_told(
    eagle3: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    """What no file shows."""
    for acceptance in (0.5, None, 0.01):
        with caplog.at_level(logging.WARNING):
            _warn_of_acceptance(eagle3.manifest, TAPS, acceptance)
    (warning,) = [r.getMessage() for r in caplog.records if "first drafts" in r.getMessage()]
    assert warning.startswith("--draft head: received 1 % of first drafts")
    assert f"states {list(TAPS)}" in warning


def test_heads_that_fit_nothing_are_told(eagle3: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    """And a lookup that finds little is not."""
    heads = MedusaDraft(
        name="heads",
        revision="",
        sha256="",
        parameters=1,
        precision="int8",
        num_heads=1,
        vocab_size=VOCAB,
        feature_width=HIDDEN,
    )
    with caplog.at_level(logging.WARNING):
        _warn_of_acceptance(replace(eagle3.manifest, draft=heads), (LAYERS,), 0.0)
        lookup = NgramDraft(min_ngram=2, max_ngram=4)
        _warn_of_acceptance(replace(eagle3.manifest, draft=lookup), (), 0.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("--draft heads: received 0 % of first drafts")
