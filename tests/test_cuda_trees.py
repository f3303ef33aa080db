"""Trees on the CUDA runtime, on a device that is this machine: the same tokens as ONNX Runtime's
executor, and caches as a clean run leaves them, whose rows only the device moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_build import K
from helpers_cuda import FakeCuda, use_fake_device
from helpers_cuda_trees import CONTEXT, NODES, Pair, build_engines, use_small_buckets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tree import trees

from export.build import BuildRequest, build
from runtime import Decoder, SamplingParams
from runtime.cuda.executor import CudaExecutor
from runtime.round import Rounds
from runtime.tree_shape import StaticTree, parse_tree
from runtime.uniforms import uniform_table
from scripts.gpu.check import run_step
from scripts.gpu.steps import Check

pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)

PROMPT = "the hand and the quick hand and the quick"
# Where fp16 and fp32 choose the same: the next greedy choice is near a tie, and draws are far from
# every edge with these seeds (of 30 that were tried, 18 are such).
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9)
# fp16 rows that were computed in other company, over two layers
NEAR = 0.02


@pytest.fixture(scope="module", autouse=True)
def small_buckets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_small_buckets(monkeypatch)
        yield


@pytest.fixture(scope="module")
def places(
    kept_traces: None, build_root: Path, tiny_target: Path, small_buckets: None
) -> dict[str, Path]:
    """By what drafts: the target itself, a lookup, the target on the CPU beside the device."""
    return {
        name: build_engines(build_root / f"cuda-trees-{name}", tiny_target, draft, backend)
        for name, draft, backend in (
            ("itself", str(tiny_target), None),
            ("ngram", "ngram", None),
            ("beside", str(tiny_target), "onnxruntime"),
        )
    }


@pytest.fixture(scope="module")
def on_the_cpu(
    own_trees_bundle: Path, build_root: Path, tiny_target: Path
) -> Iterator[dict[str, Decoder]]:
    """ONNX Runtime's executor with the same drafters, fp32."""
    lookup = BuildRequest(
        target=str(tiny_target),
        draft="ngram",
        out=build_root / "cpu-trees-ngram",
        precision="fp32",
        max_context=CONTEXT,
        max_draft_tokens=K,
        max_tree_nodes=NODES,
    )
    found = {
        "itself": Decoder.load(own_trees_bundle, threads=1),
        "ngram": Decoder.load(build(lookup), threads=1),
    }
    yield found | {"beside": found["itself"]}
    for decoder in found.values():
        decoder.close()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    use_fake_device(monkeypatch, made)
    return made


@pytest.mark.parametrize("drafter", ["itself", "ngram", "beside"])
@pytest.mark.parametrize("shape", ["3x2x1", "dynamic:16:4:4"])
def test_greedy_tokens_are_the_cpu_executors(
    places: dict[str, Path],
    on_the_cpu: dict[str, Decoder],
    cuda: FakeCuda,
    drafter: str,
    shape: str,
) -> None:
    tree = parse_tree(shape)
    expected = on_the_cpu[drafter].generate(PROMPT, GREEDY, tree=tree)
    with Decoder.load(places[drafter]) as decoder:
        found = decoder.generate(PROMPT, GREEDY, tree=tree)
        plain = decoder.generate(PROMPT, GREEDY, num_draft_tokens=0)
    assert found.token_ids == plain.token_ids
    assert found.token_ids == expected.token_ids
    assert found.stats.num_accepted_draft_tokens == expected.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("seed", [1, 3, 4, 5])
def test_sampled_tokens_are_the_cpu_executors(
    places: dict[str, Path], on_the_cpu: dict[str, Decoder], cuda: FakeCuda, seed: int
) -> None:
    """The same uniforms, so the same draws."""
    params = replace(SAMPLED, seed=seed)
    tree = parse_tree("3x2x1")
    expected = on_the_cpu["itself"].generate(PROMPT, params, tree=tree)
    with Decoder.load(places["itself"]) as decoder:
        found = decoder.generate(PROMPT, params, tree=tree)
        assert found.token_ids == decoder.generate(PROMPT, params, tree=tree).token_ids
    assert found.token_ids == expected.token_ids


def test_trees_chains_and_plain_steps_take_turns(places: dict[str, Path], cuda: FakeCuda) -> None:
    """Chains are launched whole in between: neither leaves a row where the other looks."""
    with Decoder.load(places["itself"]) as decoder:
        rounds, tokens = decoder.rounds, [5 + i % 9 for i in range(20)]
        uniforms, tree = uniform_table(1, CONTEXT, 8), parse_tree("2x2")
        params = replace(GREEDY, max_tokens=30)
        expected = list(decoder.generate(tokens, params, num_draft_tokens=0).token_ids)
        rounds.begin(GREEDY, tokens)
        start = len(tokens)
        tokens += rounds.prefill(tokens, uniforms).tokens
        while len(tokens) < start + 30:
            launches = cuda.launches
            tokens += rounds.run_tree(tokens, tree, 6, uniforms).tokens
            tokens += rounds.run(tokens, 2, uniforms).tokens
            assert cuda.launches == launches + 2  # each decided by one
            tokens += rounds.run(tokens, 0, uniforms).tokens
        assert tokens[start : start + 30] == expected[:30]


@pytest.fixture(scope="module")
def pair(places: dict[str, Path]) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_fake_device(monkeypatch, FakeCuda())
        yield Pair(places["itself"])


@given(data=st.data())
@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_trees_leave_the_caches_of_a_clean_run(pair: Pair, data: st.DataObject) -> None:
    """After each round, and after taking some of its tokens back."""
    rounds, clean = pair.rounds
    prompt = data.draw(st.lists(st.integers(5, 40), min_size=2, max_size=20))
    uniforms = uniform_table(data.draw(st.integers(0, 99)), CONTEXT, 8)
    for one in pair.rounds:
        one.forget()
        one.begin(SAMPLED, prompt)
    tokens = [*prompt, *rounds.prefill(prompt, uniforms).tokens]
    for _ in range(3):
        shape = StaticTree(tree=data.draw(trees(most=6)))
        start = len(tokens)
        tokens += rounds.run_tree(tokens, shape, NODES, uniforms).tokens
        del tokens[start + data.draw(st.integers(1, len(tokens) - start)) :]
        rounds.rollback(len(tokens))
        length = rounds.target.length
        assert length == len(tokens) - 1
        clean.forget()
        clean.prefill(tokens, uniforms)
        ours, theirs = pair.caches(length)
        np.testing.assert_allclose(ours, theirs, atol=NEAR)


def test_rows_that_stay_where_the_tree_put_them_show(pair: Pair, cuda: FakeCuda) -> None:
    """What the tolerance above is good for: without the move, caches are far from a clean run's."""
    rounds, clean = pair.rounds
    prompt, uniforms = [5 + i % 9 for i in range(12)], uniform_table(3, CONTEXT, 8)
    worst = 0.0
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(type(rounds.target._executor), "move_rows", lambda *_: None)
        for one in pair.rounds:
            one.forget()
            one.begin(SAMPLED, prompt)
        tokens = [*prompt, *rounds.prefill(prompt, uniforms).tokens]
        for _ in range(8):
            tree = parse_tree("3x2x1")  # its growth and its moves driven by the host
            tokens += Rounds.run_tree(rounds, tokens, tree, NODES, uniforms).tokens
            clean.forget()
            clean.prefill(tokens, uniforms)
            ours, theirs = pair.caches(rounds.target.length)
            worst = max(worst, float(np.abs(ours - theirs).max()))
    assert worst > 10 * NEAR


def test_the_gpu_check_tells_whether_rows_moved(places: dict[str, Path], cuda: FakeCuda) -> None:
    """Of trees whose growth the host drives; `test_cuda_whole_trees` has the others."""
    check = Check(path=places["beside"])
    found = run_step("trees", check, time.monotonic() + 300)
    assert found["status"] == "passed", found
    assert found["figures"]["accepted"] > 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(CudaExecutor, "move_rows", lambda *_: None)
        found = run_step("trees", check, time.monotonic() + 300)
    assert found["status"] == "failed"
    assert "caches differ" in found["reason"]
    check.close()


def test_a_row_is_one_copy_in_all_layers_and_heads(pair: Pair) -> None:
    rounds, graphs = pair.rounds[0], pair.graphs[0]
    executor, caches = rounds.target._executor, rounds.target._rows
    rng = np.random.default_rng(0)
    caches[...] = rng.normal(size=caches.shape)
    graphs.upload(caches)
    expected = caches.copy()
    moves = [(4, 7), (5, 8), (6, 20)]
    for to, source in moves:
        expected[..., to, :] = expected[..., source, :]
    before = list(graphs.device.driver.api.copies)
    executor.move_rows(caches, moves)
    assert graphs.device.driver.api.copies[len(before) :] == ["on"] * 3
    graphs.download(caches)
    assert np.array_equal(caches, expected)
    for one in pair.rounds:
        one.forget()
