"""EAGLE and Medusa heads on the CPU beside a target on the CUDA runtime, on a stand-in device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers_build import K
from helpers_cuda import VERSION, FakeCuda, fake_plan, use_fake_device
from helpers_heads import CONTEXT, save_head, save_target

from export import engine_bundle
from export.build import BuildRequest, build
from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle
from runtime.tree_shape import parse_tree

pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)

PROMPT = "the hand and the quick hand and the quick"
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
NODES = 14


def _request(place: Path, kind: str, draft_backend: str | None) -> BuildRequest:
    return BuildRequest(
        target=str(save_target(place)),
        draft=str(save_head(kind, place)),
        out=place / "bundle",
        backend="tensorrt-rtx",
        precision="fp16",
        draft_backend=draft_backend,
        max_context=CONTEXT,
        max_draft_tokens=K,
        max_tree_nodes=NODES,
    )


# Medusa's way to the device is EAGLE's, its heads are tested elsewhere: a minute that can wait.
@pytest.fixture(scope="module", params=["eagle3", pytest.param("medusa", marks=pytest.mark.slow)])
def bundle(
    request: pytest.FixtureRequest, kept_traces: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    place = tmp_path_factory.mktemp(f"heads-{request.param}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine_bundle, "build_plan", fake_plan)
        real = engine_bundle._Builder.card
        monkeypatch.setattr(
            engine_bundle._Builder, "card", lambda self: replace(real(self), version=VERSION)
        )
        return build(_request(place, request.param, "onnxruntime"))


def test_the_states_were_held_against_the_checkpoints(bundle: Path) -> None:
    gates = {gate.name: gate.status for gate in Bundle.load(bundle).manifest.gates}
    assert gates["features"] == gates["draft parity"] == "passed"


def test_chains_and_trees_are_plain_greedy(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States cross from the device, tokens and rows of q cross to it."""
    use_fake_device(monkeypatch, FakeCuda())
    with Decoder.load(bundle) as decoder:
        plain = decoder.generate(PROMPT, GREEDY, num_draft_tokens=0).token_ids
        levels = min(3, decoder.rounds.brancher.most_levels)  # type: ignore[union-attr]
        shapes = [None, parse_tree("x".join("2" * levels))]
        for tree in shapes:
            k = None if tree else levels
            found = decoder.generate(PROMPT, GREEDY, num_draft_tokens=k, tree=tree)
            assert found.token_ids == plain
            assert found.stats.num_spec_steps > 0


def test_what_a_head_starts_from_is_the_cpu_backends(
    bundle: Path, kept_traces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of a prompt, fp16 against the fp32 of a bundle for the CPU."""
    import numpy as np

    head = next(path for path in bundle.parent.iterdir() if path.name in ("eagle3", "medusa"))
    other = build(
        BuildRequest(
            target=str(bundle.parent / "target"),
            draft=str(head),
            out=bundle.parent / "cpu",
            precision="fp32",
            max_context=CONTEXT,
            max_draft_tokens=K,
            max_tree_nodes=NODES,
        )
    )
    found = []
    use_fake_device(monkeypatch, FakeCuda())
    for path in (bundle, other):
        with Decoder.load(path) as decoder:
            decoder.generate(list(range(5, 25)), replace(GREEDY, max_tokens=1))
            features = decoder.rounds.target.features
            assert features is not None
            found.append(features._rows[:20].copy())
    assert np.abs(found[1]).max() > 0.01
    np.testing.assert_allclose(*found, atol=0.02 * float(np.abs(found[1]).max()))
