"""Whole rounds with trees on the CUDA runtime, on a device that is this machine: one launch and one
copy each way, the tokens and the caches of rounds whose growth and moves the host drives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_cuda import FakeCuda, use_fake_device
from helpers_cuda_trees import CONTEXT, NODES, Pair, build_engines, use_small_buckets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tree import trees

from runtime import SamplingParams
from runtime.bundle import Bundle
from runtime.cuda.call import CudaCall
from runtime.cuda.graphs import RESERVE_BYTES, EngineGraphs
from runtime.engine import load_rounds
from runtime.errors import BundleError
from runtime.executor import EngineOptions
from runtime.tree_contract import TREE_GRAPHS
from runtime.tree_shape import StaticTree, parse_tree
from runtime.uniforms import uniform_table
from runtime.whole_rounds import WholeRounds
from scripts.gpu.check import run_step
from scripts.gpu.steps import Check

pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, top_k=3)
# fp16 rows that were computed in other company, over two layers
NEAR = 0.02
SHAPE = parse_tree("3x2x1")


@pytest.fixture(scope="module", autouse=True)
def small_buckets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_small_buckets(monkeypatch)
        yield


@pytest.fixture(scope="module")
def place(
    kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path, small_buckets: None
) -> Path:
    """A draft with fewer tokens than its target and a cache of half the context."""
    return build_engines(build_root / "cuda-whole-trees", tiny_target, str(tiny_draft))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    use_fake_device(monkeypatch, made)
    return made


@pytest.fixture(scope="module")
def pair(place: Path) -> Iterator[Pair]:
    """The first launches whole rounds; growth and moves of the second are the host's."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_fake_device(monkeypatch, FakeCuda())
        found = Pair(place)
        assert isinstance(found.rounds[1], WholeRounds)
        found.rounds[1].whole_trees = None
        yield found


def _begun(pair: Pair, prompt: list[int], params: SamplingParams, seed: int) -> list[int]:
    pair.uniforms = uniform_table(seed, CONTEXT + 1, 8)
    for one in pair.rounds:
        one.forget()
        one.begin(params, prompt)
    first, other = (one.prefill(list(prompt), pair.uniforms).tokens for one in pair.rounds)
    assert first == other
    return [*prompt, *first]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["3x2x1", "4x1x1x1", "[[0],[1],[0,0],[1,0],[1,1],[1,1,0]]"])
def test_tokens_are_those_of_rounds_that_the_host_drives(
    pair: Pair, shape: str, params: SamplingParams
) -> None:
    """To the context's end, in one launch each. The host reads what the draft lacks, a program as
    many rows always, whose fp16 bits may differ: no tie fell otherwise in 2,411 rounds once tried.
    """
    tree, accepted = parse_tree(shape), 0
    rounds, steps = pair.rounds
    api = pair.graphs[0].device.driver.api
    for seed in range(2):
        tokens = _begun(pair, [5 + (seed + 3 * i) % 11 for i in range(30)], params, seed)
        while len(tokens) + tree.nodes < CONTEXT:
            launches = api.launches
            found = rounds.run_tree(tokens, tree, tree.nodes, pair.uniforms)
            assert api.launches == launches + 1
            expected = steps.run_tree(tokens, tree, tree.nodes, pair.uniforms)
            assert (found.tokens, found.ranks) == (expected.tokens, expected.ranks)
            assert (found.num_nodes, found.num_drafted) == (tree.nodes, tree.depth)
            tokens += found.tokens
            accepted += found.num_accepted
            for one in pair.rounds:
                one.rollback(len(tokens))
    assert accepted > 5
    assert tree.tree.parents in {one.parents for one in rounds.whole_trees.programs.captured}


def test_a_launch_has_one_copy_each_way(pair: Pair) -> None:
    rounds, uniforms = pair.rounds[0], uniform_table(0, CONTEXT + 1, 8)
    tokens = _begun(pair, [5, 6, 7, 8, 9, 10], GREEDY, 0)
    tokens += rounds.run_tree(tokens, SHAPE, SHAPE.nodes, uniforms).tokens
    api = pair.graphs[0].device.driver.api
    before = len(api.copies)
    rounds.run_tree(tokens, SHAPE, SHAPE.nodes, uniforms)
    copies = api.copies[before:]
    assert [kind for kind in copies if kind != "on"] == ["up", "down"]
    assert copies[0] == "up"
    assert copies[-1] == "down"


@given(data=st.data())
@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_trees_leave_the_caches_of_a_clean_run(pair: Pair, data: st.DataObject) -> None:
    """The target's and the draft's, after each round, and after taking some tokens back; trees
    beyond those that programs are kept for are grown by the host in between."""
    rounds, clean = pair.rounds
    prompt = data.draw(st.lists(st.integers(5, 40), min_size=8, max_size=20))
    tokens = _begun(pair, prompt, SAMPLED, data.draw(st.integers(0, 99)))
    for _ in range(3):
        shape = SHAPE if data.draw(st.booleans()) else StaticTree(tree=data.draw(trees(most=6)))
        start = len(tokens)
        tokens += rounds.run_tree(tokens, shape, NODES, pair.uniforms).tokens
        del tokens[start + data.draw(st.integers(1, len(tokens) - start)) :]
        rounds.rollback(len(tokens))
        window = rounds.drafter.window  # type: ignore[union-attr]
        base, read = window.base, window.rows
        assert rounds.target.length == len(tokens) - 1 >= base + read
        clean.forget()
        clean.prefill(tokens, pair.uniforms)
        _read(clean, tokens[: base + read], base)
        np.testing.assert_allclose(*pair.caches(len(tokens) - 1), atol=NEAR)
        for ours, theirs in zip(*pair.draft_caches(read), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=NEAR)


def _read(rounds, tokens: list[int], base: int) -> None:  # type: ignore[no-untyped-def]
    """The draft has read these from `base` on, in one call."""
    window = rounds.drafter.window
    window.base, window.rows = base, 0
    if tokens[base:]:
        rounds.brancher._calls.read(tokens[base:])


def test_trees_chains_and_plain_steps_take_turns(pair: Pair) -> None:
    """Greedy text is plain text, whoever wrote the rows before."""
    rounds, dynamic = pair.rounds[0], parse_tree("dynamic:6:3:2")
    tokens = _begun(pair, [5 + i % 9 for i in range(12)], GREEDY, 1)
    plain = list(tokens)
    while len(plain) < CONTEXT - NODES:
        plain += rounds.run(plain, 0, pair.uniforms).tokens
    tokens = _begun(pair, plain[:12], GREEDY, 1)
    while len(tokens) < len(plain) - 12:
        for turn in (SHAPE, 2, SHAPE, dynamic, 0):
            if isinstance(turn, int):
                tokens += rounds.run(tokens, turn, pair.uniforms).tokens
            else:
                tokens += rounds.run_tree(tokens, turn, NODES, pair.uniforms).tokens
            rounds.rollback(len(tokens))
    assert tokens[: len(plain)] == plain[: len(tokens)]


def test_a_bundle_without_the_plans_takes_the_steps(place: Path, cuda: FakeCuda) -> None:
    """As one of an earlier build; a bundle that lost one is refused."""
    bundle = Bundle.load(place)
    plans = {f"engines/{name}.plan" for name in TREE_GRAPHS}
    assert plans < set(bundle.manifest.files)
    kept = {name: one for name, one in bundle.manifest.files.items() if name not in plans}
    older = replace(bundle.manifest, files=kept)
    rounds = load_rounds(place, older, EngineOptions(), EngineGraphs(place, older))
    assert isinstance(rounds, WholeRounds)
    assert rounds.whole_trees is None
    assert rounds.trees is not None


def test_a_bundle_that_lost_a_plan_is_refused(place: Path, tmp_path: Path) -> None:
    import shutil

    path = shutil.copytree(place, tmp_path / "bundle")
    (path / "engines" / "place.plan").unlink()
    with pytest.raises(BundleError, match=r"files missing \['engines/place.plan'\]"):
        Bundle.load(path)


def test_programs_by_tree_and_bucket_within_the_memory(place: Path, cuda: FakeCuda) -> None:
    manifest = Bundle.load(place).manifest
    rounds = load_rounds(place, manifest, EngineOptions())
    assert isinstance(rounds, WholeRounds)
    assert rounds.whole_trees is not None
    programs, uniforms = rounds.whole_trees.programs, uniform_table(0, CONTEXT + 1, 8)
    other = parse_tree("2x2")

    def ran(tree: StaticTree, length: int) -> None:
        rounds.forget()
        tokens = [5 + i % 9 for i in range(length)]
        rounds.begin(GREEDY, tokens)
        tokens += rounds.prefill(list(tokens), uniforms).tokens
        rounds.run_tree(tokens, tree, tree.nodes, uniforms)

    ran(SHAPE, 10)
    ran(SHAPE, 40)
    assert [(one.parents, one.context) for one in programs.captured] == [
        (SHAPE.tree.parents, 96), (SHAPE.tree.parents, 32), (SHAPE.tree.parents, 64)
    ]  # fmt: skip
    cuda.free = RESERVE_BYTES + 1  # room for the largest, which serves all
    ran(other, 10)
    assert [one.context for one in programs.captured[3:]] == [96]
    cuda.free = RESERVE_BYTES  # none for another tree
    ran(parse_tree("3x1"), 10)
    ran(other, 40)
    assert len(programs.captured) == 4


def _without_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would place rows does nothing."""
    real = CudaCall.enqueue

    def enqueue(self: CudaCall, context_rows: int) -> None:
        if not any(one.name == "path_rows" for one in self.inputs):
            real(self, context_rows)

    monkeypatch.setattr(CudaCall, "enqueue", enqueue)


def test_the_gpu_check_tells_whether_rows_moved(
    place: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check(path=place)
    found = run_step("trees", check, time.monotonic() + 300)
    assert found["status"] == "passed", found
    assert found["figures"]["accepted"] > 0
    assert found["figures"]["launches"] == found["figures"]["rounds"] > 0
    assert found["figures"]["other_tokens"] == 0
    aliased = run_step("aliasing", check, time.monotonic() + 60)
    assert aliased["figures"]["place"] == 1
    assert aliased["figures"]["path"] == 0
    check.close()
    _without_moves(monkeypatch)
    check = Check(path=place)
    found = run_step("trees", check, time.monotonic() + 300)
    assert found["status"] == "failed"
    assert "caches differ" in found["reason"]
    check.close()
