"""Caches in 8 bits: steps from the reference's own, the operator's arithmetic, bundles."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_build import K
from helpers_calibration import changed_tensor

from calibration import cache_steps
from calibration.cache_steps import CacheSteps, cache_reach
from calibration.collect import Calibration
from calibration.sites import ReferenceGraph
from export.build import BuildRequest, build
from export.calibrated import CalibrationRequest
from export.gate_graph import GateGraph
from export.gates import exact_arithmetic, relative_error
from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle
from runtime.errors import BuildError, EngineError
from runtime.executor import EngineOptions

TEXTS = tuple(tuple((7 * i + j) % 250 for j in range(20 + i)) for i in range(6))


@pytest.fixture
def run(fp32_bundle: Path, tmp_path: Path) -> Calibration:
    card = Bundle.load(fp32_bundle).manifest.target
    return Calibration(
        cache=card.cache,
        vocab=card.vocab_size,
        texts=TEXTS,
        work=tmp_path,
        options=EngineOptions(threads=1, spin=False),
    )


@pytest.fixture
def reference(fp32_bundle: Path) -> ReferenceGraph:
    return ReferenceGraph(fp32_bundle / "onnx" / "target.onnx")


def test_steps_reach_as_far_as_the_caches_do(
    reference: ReferenceGraph, run: Calibration, tmp_path: Path
) -> None:
    """Against caches that another reader filled, text by text."""
    graph = GateGraph(reference.path, run.cache, run.vocab)
    expected: dict[str, np.ndarray] = {}
    for text in TEXTS:
        graph.reset()
        graph.rows(text)
        for name, cache in graph._past.items():
            most = np.abs(cache[0]).max(1).reshape(-1)
            expected[name] = np.maximum(expected.get(name, 0), most)
    found = cache_reach(reference, run)
    assert found.keys() == expected.keys()
    for name, most in expected.items():
        np.testing.assert_allclose(found[name], most, rtol=1e-4, atol=1e-6)
    steps = CacheSteps(path=tmp_path / "steps.npz")
    steps.put({**found, "past_key_values.0.key": 0 * found["past_key_values.0.key"]})
    recalled = CacheSteps(path=steps.path)
    recalled.recall()
    np.testing.assert_array_equal(recalled.of(0)[0], 1)
    np.testing.assert_allclose(recalled.of(1)[1] * 127, found["past_key_values.1.value"], rtol=1e-6)


def test_an_interrupted_run_goes_on_behind_the_last_text(
    reference: ReferenceGraph, run: Calibration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    straight = cache_reach(reference, replace(run, work=tmp_path / "straight"))
    read: list[int] = []
    true_read = cache_steps._read

    def failing(reader, text, vocab):  # type: ignore[no-untyped-def]
        if len(read) == 4:
            raise KeyboardInterrupt
        read.append(len(text))
        true_read(reader, text, vocab)

    with monkeypatch.context() as patch:
        patch.setattr(cache_steps, "_read", failing)
        with pytest.raises(KeyboardInterrupt):
            cache_reach(reference, run)
    more: list[int] = []

    def counting(reader, text, vocab):  # type: ignore[no-untyped-def]
        more.append(len(text))
        true_read(reader, text, vocab)

    monkeypatch.setattr(cache_steps, "_read", counting)
    resumed = cache_reach(reference, run)
    assert more == [len(text) for text in TEXTS[4:]]
    for name, most in straight.items():
        np.testing.assert_array_equal(resumed[name], most)


def test_a_cache_that_is_not_finite_names_the_layer(
    fp32_bundle: Path, run: Calibration, tmp_path: Path
) -> None:
    copied = shutil.copytree(fp32_bundle, tmp_path / "copy")
    name = "model.layers.0.mlp.down_proj.weight.T"
    changed_tensor(name, np.float32, lambda a: a * np.float32("inf"), "target")(copied)
    with pytest.raises(EngineError, match=r"layer 1: received a cache of keys that is not finite"):
        cache_reach(ReferenceGraph(copied / "onnx" / "target.onnx"), run)


# Bundles


@pytest.fixture(scope="module")
def asked(kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path) -> BuildRequest:
    return BuildRequest(
        target=str(tiny_target),
        draft=str(tiny_draft),
        out=build_root / "int8-kv",
        precision="int8-kv",
        max_draft_tokens=K,
        calibration=CalibrationRequest(cache=build_root / "int8-kv-cache"),
    )


@pytest.fixture(scope="module")
def bundle(asked: BuildRequest) -> Bundle:
    return Bundle.load(build(asked))


def test_a_bundle_passes_its_gates(bundle: Bundle) -> None:
    """Among them a rollback, bit for bit, over caches of 8 bits."""
    assert {gate.status for gate in bundle.manifest.gates} == {"passed"}
    target, draft = bundle.manifest.target, bundle.manifest.draft_model
    assert target.cache.dtype == "int8"
    assert target.cache.bytes(1) == replace(target.cache, dtype="float32").bytes(1) // 4
    assert draft is not None
    assert (draft.precision, draft.cache.dtype) == ("int8", "float32")


def test_rows_have_the_same_bits_alone_and_among_others(bundle: Bundle) -> None:
    """Which with f32 caches takes the pass `rows_alike`."""
    card, path = bundle.manifest.target, bundle.model_path("target")
    tokens = [(5 * i + 1) % 250 for i in range(40)]
    graph = GateGraph(path, card.cache, card.vocab_size)
    whole = graph.rows(tokens)
    graph.reset()
    alone = np.concatenate([graph.rows([token]) for token in tokens])
    np.testing.assert_array_equal(alone, whole)


def test_what_the_caches_cost_is_rounding(bundle: Bundle) -> None:
    card, path = bundle.manifest.target, bundle.model_path("target")
    tokens = [(5 * i + 1) % 250 for i in range(40)]
    with exact_arithmetic(path) as variant:
        wide = replace(card.cache, dtype="float32")
        expected = GateGraph(variant, wide, card.vocab_size).rows(tokens)
    error = relative_error(GateGraph(path, card.cache, card.vocab_size).rows(tokens), expected)
    assert 1e-4 < error < 0.1


def test_greedy_text_with_drafts_is_the_plain_text(bundle: Bundle) -> None:
    decoder = Decoder.load(bundle.path, threads=1, spin=False)
    params = SamplingParams(max_tokens=24)
    for prompt in ("def mean(values):", "The quick brown fox"):
        drafted = decoder.generate(prompt, params, num_draft_tokens=K)
        plain = decoder.generate(prompt, params, num_draft_tokens=0)
        assert drafted.token_ids == plain.token_ids


def test_what_reads_f32_caches_is_refused(asked: BuildRequest, tmp_path: Path) -> None:
    trees = replace(asked, out=tmp_path / "trees", max_tree_nodes=8)
    with pytest.raises(BuildError, match=r"--max-tree-nodes: received 8 with --precision int8-kv"):
        build(trees)
    skipping = replace(asked, out=tmp_path / "skip", draft="layer-skip", skip_layers="1")
    with pytest.raises(BuildError, match=r"--draft: received layer-skip with --precision int8-kv"):
        build(skipping)
