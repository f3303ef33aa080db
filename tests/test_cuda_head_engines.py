"""EAGLE and Medusa heads whose engines are beside the target's, on a stand-in for the device.

Weights are random, so that little is accepted; what counts is that what is drafted is what ONNX
Runtime's backend drafts, and that the text stays the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_build import K
from helpers_cuda import VERSION, FakeCuda, fake_plan, use_fake_device
from tiny_checkpoints import llama_config, save
from tiny_heads import (
    HIDDEN,
    eagle1_config,
    eagle1_state,
    eagle3_state,
    maps,
    medusa_config,
    medusa_state,
    published_config,
    write_head,
)

from engines.tensorrt import ranges
from export import engine_bundle
from export.build import BuildRequest, build
from runtime import Decoder, SamplingParams, engine_contract
from runtime.bundle import Bundle
from runtime.engine import load_rounds, open_graphs
from runtime.executor import EngineOptions
from runtime.round import Rounds
from runtime.tree_shape import parse_tree
from runtime.uniforms import uniform_table

pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)

KINDS = ("eagle3", "eagle1", "medusa")
PROMPT = "the hand and the quick hand and the quick"
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9)
CONTEXT, NODES = 96, 14
SMALL = 0.15  # of weights, so that fp16 bears the states of a head without norms


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One head beside one target, built for the device and for ONNX Runtime in fp32."""

    engines: Path
    cpu: Path


def _head(kind: str, place: Path) -> str:
    if kind == "medusa":
        file = "medusa_lm_head.safetensors"
        return str(write_head(place / kind, medusa_config(), medusa_state(), file))
    if kind == "eagle3":
        return str(write_head(place / kind, published_config(), eagle3_state() | maps()))
    state = {name: SMALL * value for name, value in eagle1_state().items()}
    return str(write_head(place / kind, eagle1_config(), state))


def _request(place: Path, kind: str, **changes: Any) -> BuildRequest:
    target = place / "target"
    save(target, llama_config(hidden_size=HIDDEN, num_hidden_layers=7))
    asked = BuildRequest(
        target=str(target),
        draft=_head(kind, place),
        out=place / "engines",
        backend="tensorrt-rtx",
        precision="fp16",
        max_context=CONTEXT,
        max_draft_tokens=K,
        max_tree_nodes=NODES,
    )
    return replace(asked, **changes)


def _build(request: BuildRequest) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine_bundle, "build_plan", fake_plan)
        real = engine_bundle._Builder.card
        monkeypatch.setattr(
            engine_bundle._Builder, "card", lambda self: replace(real(self), version=VERSION)
        )
        return build(request)


@pytest.fixture(scope="module", autouse=True)
def small_buckets() -> Iterator[None]:
    """Context buckets of 32, 64 and 96 rows, when building and when running."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine_contract, "LEAST_CONTEXT", 32)
        monkeypatch.setattr(ranges, "LEAST_CONTEXT", 32)
        yield


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, kept_traces: None, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    place = tmp_path_factory.mktemp(request.param)
    asked = _request(place, request.param)
    cpu = replace(asked, out=place / "cpu", backend="onnxruntime", precision="fp32")
    return Pair(engines=_build(asked), cpu=build(cpu))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    use_fake_device(monkeypatch, made)
    return made


def _levels(decoder: Decoder) -> int:
    assert decoder.rounds.brancher is not None
    return min(3, decoder.rounds.brancher.most_levels)


def test_the_bundle_says_what_is_where(pair: Pair) -> None:
    manifest = Bundle.load(pair.engines).manifest
    draft = manifest.draft
    assert draft is not None
    assert manifest.engines is not None
    assert manifest.engines.draft_backend == "tensorrt-rtx"
    graphs = {*draft.graphs, *(draft.tree_graphs or ()), "target", "accept"}
    assert {f"engines/{name}.plan" for name in graphs} == {
        name for name in manifest.files if name.endswith((".plan", ".onnx"))
    }
    gates = {gate.name: gate for gate in manifest.gates}
    assert {"draft parity", "draft engine", "branch", "features"} <= set(gates)
    assert {gate.status for gate in gates.values()} == {"passed"}
    assert float(gates["draft parity"].figures["relative_error"]) < 1e-4
    assert float(gates["draft engine"].figures["relative_error"]) > 1e-6, "fp16 was run in fp16"


def test_chains_and_trees_are_plain_greedy(pair: Pair, cuda: FakeCuda) -> None:
    with Decoder.load(pair.engines) as decoder:
        plain = decoder.generate(PROMPT, GREEDY, num_draft_tokens=0).token_ids
        levels = _levels(decoder)
        for tree in (None, parse_tree("x".join("2" * levels)), parse_tree("dynamic:8:3:3")):
            k = None if tree else levels
            found = decoder.generate(PROMPT, GREEDY, num_draft_tokens=k, tree=tree)
            assert found.token_ids == plain
            assert found.stats.num_spec_steps > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_the_cpu_backends(pair: Pair, cuda: FakeCuda, params: SamplingParams) -> None:
    """Behind the same text, round by round: the same tokens but near ties and edges of draws, and
    of the first draft q within fp16's rounding."""
    text = [5 + (7 * i) % 40 for i in range(44)]
    found = [_drafts(path, text, params) for path in (pair.engines, pair.cpu)]
    same = [a.tokens == b.tokens for a, b in zip(*found, strict=True)]
    assert np.mean(same) > 0.8
    apart = [0.5 * float(np.abs(a.q - b.q).sum()) for a, b in zip(*found, strict=True)]
    assert np.median(apart) < 0.02


@dataclass(frozen=True, kw_only=True)
class Drafted:
    tokens: list[int]
    q: np.ndarray  # of the first


def _drafts(path: Path, text: list[int], params: SamplingParams) -> list[Drafted]:
    manifest, uniforms = Bundle.load(path).manifest, uniform_table(3, CONTEXT)
    graphs = open_graphs(path, manifest)
    rounds = load_rounds(path, manifest, EngineOptions(threads=1), graphs)
    k, found = manifest.limits.max_draft_tokens, []
    rounds.begin(params, text[:10])
    rounds.prefill(text[:10], uniforms)
    for end in range(11, len(text)):
        rounds.target.length = end - 1
        Rounds.run(rounds, text[:end], k, uniforms)  # the steps, whatever `rounds` is
        graphs.download(rounds.buffers.draft_probs)
        tokens = rounds.buffers.block[0, 2 : 2 + k].tolist()
        found.append(Drafted(tokens=tokens, q=rounds.buffers.draft_probs[0, 0].copy()))
        rounds.rollback(end)
    return found
