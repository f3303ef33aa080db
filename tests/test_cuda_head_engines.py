"""EAGLE and Medusa heads whose engines are beside the target's, on a stand-in for the device.

Weights are random, so that little is accepted; what counts is that what is drafted is what ONNX
Runtime's backend drafts, and that the text stays the target's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_build import K
from helpers_cuda import VERSION, FakeCuda, fake_plan, use_fake_device
from helpers_heads import CONTEXT, save_head, save_target

from engines.tensorrt import ranges
from export import engine_bundle
from export.build import BuildRequest, build
from runtime import Decoder, SamplingParams, engine_contract
from runtime.bundle import Bundle
from runtime.engine import load_rounds, open_graphs
from runtime.executor import EngineOptions
from runtime.features import FeatureStore
from runtime.round import Rounds
from runtime.tree_shape import parse_tree
from runtime.uniforms import uniform_table
from runtime.whole_rounds import WholeRounds
from scripts.gpu import steps
from scripts.gpu.check import run_step
from scripts.gpu.steps import STEPS, Check

pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)

PROMPT = "the hand and the quick hand and the quick"
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9)
NODES = 14


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One head beside one target, built for the device and for ONNX Runtime in fp32."""

    engines: Path
    cpu: Path


def _request(place: Path, kind: str, **changes: Any) -> BuildRequest:
    asked = BuildRequest(
        target=str(save_target(place)),
        draft=str(save_head(kind, place)),
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


# EAGLE-1's way is EAGLE-3's but for what joins the states: half a minute that can wait.
@pytest.fixture(
    scope="module", params=["eagle3", "medusa", pytest.param("eagle1", marks=pytest.mark.slow)]
)
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


def test_a_chain_of_a_head_is_one_launch(pair: Pair, cuda: FakeCuda) -> None:
    """And one copy each way."""
    with Decoder.load(pair.engines) as decoder:
        found = decoder.generate(PROMPT, GREEDY, num_draft_tokens=2)
        assert cuda.launches >= found.stats.num_spec_steps - 1
        rounds, uniforms = decoder.rounds, uniform_table(1, CONTEXT + 1)
        tokens = [5 + (7 * i) % 40 for i in range(30)]
        rounds.begin(GREEDY, tokens)
        tokens += rounds.prefill(list(tokens), uniforms).tokens
        for _ in range(3):  # the first catches up, the second may capture
            tokens += rounds.run(list(tokens), 2, uniforms).tokens
        launches, cuda.copies = cuda.launches, []
        tokens += rounds.run(list(tokens), 2, uniforms).tokens
        assert cuda.launches == launches + 1
        assert (cuda.copies.count("up"), cuda.copies.count("down")) == (1, 1)


def test_whole_rounds_are_the_steps(pair: Pair, cuda: FakeCuda) -> None:
    """Through every bucket, k up and down, trees and plain steps between; the same tokens and
    drafts accepted, the same features kept."""
    found, launches = [], []
    for whole in (True, False):
        with Decoder.load(pair.engines) as decoder, pytest.MonkeyPatch.context() as monkeypatch:
            if not whole:
                monkeypatch.setattr(WholeRounds, "_is_whole", lambda *_: False)
                monkeypatch.setattr(WholeRounds, "_decide_tree", Rounds._decide_tree)
            rounds, uniforms = decoder.rounds, uniform_table(1, CONTEXT + 1, 8)
            levels, seen = _levels(decoder), []
            tree = parse_tree("x".join("2" * levels))
            tokens = [5 + (7 * i) % 40 for i in range(12)]
            rounds.begin(SAMPLED, tokens)
            tokens += rounds.prefill(list(tokens), uniforms).tokens
            for i in range(60):
                if len(tokens) + NODES + 2 > CONTEXT:
                    break
                outcome = (
                    rounds.run_tree(list(tokens), tree, NODES, uniforms)
                    if i % 5 == 4
                    else rounds.run(list(tokens), (3, 1, 0, 2)[i % 5] % (levels + 1), uniforms)
                )
                tokens += outcome.tokens
                seen.append((outcome.tokens, outcome.num_accepted))
            features = rounds.target.features
            assert features is not None
            found.append((seen, features._rows[: len(tokens) - 1].copy()))
            launches.append(cuda.launches)
    assert len(found[0][0]) > 15
    assert launches[1] == launches[0] > 0.7 * len(found[0][0]), "trees and chains, not plain steps"
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=0.01 * np.abs(found[1][1]).max())


def test_penalties_take_the_steps(pair: Pair, cuda: FakeCuda) -> None:
    with Decoder.load(pair.engines) as decoder:
        free = decoder.generate("abc", GREEDY, num_draft_tokens=0).token_ids
        banned = replace(GREEDY, banned_tokens=tuple(set(free)), repetition_penalty=1.3)
        texts = [
            decoder.generate("abc", banned, num_draft_tokens=k).token_ids
            for k in (0, 2, _levels(decoder))
        ]
    assert not set(texts[0]) & set(free)
    assert texts[1] == texts[2] == texts[0]


def test_everything_is_freed(pair: Pair, cuda: FakeCuda) -> None:
    with Decoder.load(pair.engines) as decoder:
        decoder.generate("abc", GREEDY, num_draft_tokens=2)
        assert cuda.blocks
    del decoder
    gc.collect()
    assert not cuda.blocks


def test_every_step_of_the_gpu_check_passes(
    pair: Pair, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "ROUNDS", 60)
    monkeypatch.setattr(steps, "REPEATS", 2)
    monkeypatch.setattr(steps, "CONTEXTS", (32,))
    check = Check(path=pair.engines)
    # A driver, a gigabyte, other bundles.
    skipped = {"machine", "bandwidth", "onnxruntime-cuda", "large"}
    results = {n: run_step(n, check, time.monotonic() + 300) for n in STEPS if n not in skipped}
    check.close()
    bad = {name: one["reason"] for name, one in results.items() if one["status"] != "passed"}
    assert not bad
    assert results["draft"]["figures"]["rows"] > 0
    assert results["captured"]["figures"]["captured"]
    assert "captured round 2" in results["times"]["figures"]["context 32"]


def test_the_gpu_check_finds_states_one_row_late(pair: Pair, cuda: FakeCuda) -> None:
    real = FeatureStore.copy
    check = Check(path=pair.engines)
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(
            FeatureStore, "copy", lambda self, start, into: real(self, max(0, start - 1), into)
        )
        found = run_step("draft", check, time.monotonic() + 300)
    check.close()
    assert found["status"] == "failed"
    assert "in total variation from the oracle's" in found["reason"]


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
