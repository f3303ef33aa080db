"""The CUDA runtime on a device that is this machine: buffers, copies, captures and their ends.

The engines are the strongly typed graphs themselves, on ONNX Runtime's CPU, at the addresses that
the runtime gave. What the real libraries do is for `scripts/gpu_check`, on a GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import has_cuda
from helpers_cuda import (
    VERSION,
    FakeConfig,
    FakeCuda,
    FakeKernels,
    fake_plan,
    use_fake_device,
)

from engines.tensorrt import ranges
from export import engine_bundle
from export.build import BuildRequest, build
from runtime import Decoder, SamplingParams, engine_contract
from runtime.bundle import Bundle
from runtime.captured_round import RoundInputs
from runtime.cuda.device import Device
from runtime.cuda.driver import Driver
from runtime.cuda.kernels import VARIABLE
from runtime.errors import BundleError, EngineError
from runtime.uniforms import uniform_table
from runtime.whole_rounds import WholeRounds
from scripts.gpu import large, steps
from scripts.gpu.check import readable, run_step
from scripts.gpu.steps import STEPS, Check

pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)


@pytest.fixture(scope="module")
def bundle(
    small_buckets: None, kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path
) -> Path:
    return _build(build_root / "fake-engines", tiny_target, tiny_draft)


def _build(out: Path, target: Path, draft: Path | None, draft_backend: str | None = None) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine_bundle, "build_plan", fake_plan)
        real = engine_bundle._Builder.card
        monkeypatch.setattr(
            engine_bundle._Builder, "card", lambda self: replace(real(self), version=VERSION)
        )
        return build(
            BuildRequest(
                target=str(target),
                draft=str(draft) if draft else None,
                out=out,
                backend="tensorrt-rtx",
                precision="fp16",
                draft_backend=draft_backend,
                max_draft_tokens=4,
            )
        )


@pytest.fixture(scope="module", autouse=True)
def small_buckets() -> Iterator[None]:
    """Context buckets of 32, 64 and 128 rows, when building and when running."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine_contract, "LEAST_CONTEXT", 32)
        monkeypatch.setattr(ranges, "LEAST_CONTEXT", 32)
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    use_fake_device(monkeypatch, made)
    return made


GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_k=30, seed=5)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_it_decodes(bundle: Path, cuda: FakeCuda, params: SamplingParams) -> None:
    with Decoder.load(bundle) as decoder:
        drafted = decoder.generate("abcabc", params, num_draft_tokens=4)
        assert decoder.stats is not None
        assert decoder.stats.num_accepted_draft_tokens > 0
        launches = cuda.launches
        assert launches >= len(drafted.token_ids) / 5, "every round is one launch"
        plain = decoder.generate("abcabc", params, num_draft_tokens=0)
        assert cuda.launches == launches
        stepped = _step_by_step(decoder, params)
    assert len(drafted.token_ids) == 24
    assert drafted.token_ids == stepped
    if params is GREEDY:
        assert drafted.token_ids == plain.token_ids


def _step_by_step(decoder: Decoder, params: SamplingParams) -> tuple[int, ...]:
    """The same request, none of whose rounds is launched whole."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(WholeRounds, "_is_whole", lambda *_: False)
        return decoder.generate("abcabc", params, num_draft_tokens=4).token_ids


def test_long_texts_go_through_every_bucket(bundle: Path, cuda: FakeCuda) -> None:
    """Draft windows start anew on the way: its cache holds 48 rows."""
    params = replace(GREEDY, max_tokens=110)
    with Decoder.load(bundle) as decoder:
        drafted = decoder.generate("abc", params, num_draft_tokens=3).token_ids
        rounds = decoder._rounds
        assert isinstance(rounds, WholeRounds)
        contexts = {shape.context for shape in rounds.captured.programs.captured}
        assert contexts == {32, 64, 128}
        assert drafted == decoder.generate("abc", params, num_draft_tokens=0).token_ids


def test_penalties_and_bans_reach_the_device(bundle: Path, cuda: FakeCuda) -> None:
    with Decoder.load(bundle) as decoder:
        free = decoder.generate("abc", GREEDY, num_draft_tokens=0).token_ids
        banned = replace(GREEDY, banned_tokens=tuple(set(free)), repetition_penalty=1.3)
        for k in (0, 3):
            found = decoder.generate("abc", banned, num_draft_tokens=k).token_ids
            assert not set(found) & set(free)


def test_a_draft_on_the_cpu_drafts_for_a_target_on_the_device(
    kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path, cuda: FakeCuda
) -> None:
    beside = _build(build_root / "fake-beside", tiny_target, tiny_draft, "onnxruntime")
    with Decoder.load(beside) as decoder:
        drafted = decoder.generate("abcabc", GREEDY, num_draft_tokens=4)
        assert decoder.stats is not None
        assert decoder.stats.num_accepted_draft_tokens > 0
        assert drafted.token_ids == decoder.generate("abcabc", GREEDY, num_draft_tokens=0).token_ids


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_bundles_without_a_draft_engine(
    kept_traces: None, build_root: Path, tiny_target: Path, cuda: FakeCuda, draft: str | None
) -> None:
    path = build_root / f"fake-{draft}"
    found = _build(path, tiny_target, Path(draft) if draft else None)
    with Decoder.load(found) as decoder:
        plain = decoder.generate("abcabcabc", GREEDY, num_draft_tokens=0).token_ids
        if draft:
            drafted = decoder.generate("abcabcabc", GREEDY, num_draft_tokens=4)
            assert drafted.token_ids == plain
        assert len(plain) == 24


def test_every_step_of_the_gpu_check_passes(
    bundle: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "ROUNDS", 60)
    monkeypatch.setattr(steps, "REPEATS", 2)
    monkeypatch.setattr(steps, "CONTEXTS", (32,))
    check = Check(path=bundle)
    # A driver's version, a gigabyte, a GPU; and trees, which have tests of their own.
    skipped = {"machine", "bandwidth", "onnxruntime-cuda", "large", "trees"}
    results = {n: run_step(n, check, time.monotonic() + 300) for n in STEPS if n not in skipped}
    check.close()
    failed = {name: one["reason"] for name, one in results.items() if one["status"] != "passed"}
    assert not failed
    assert results["captured"]["figures"]["accepted"] > 0
    assert results["times"]["figures"]["context 32"]["draft 1"] > 0


def test_the_gpu_check_times_a_large_bundle_behind_the_others(
    bundle: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory comes after theirs is free."""
    monkeypatch.setattr(steps, "REPEATS", 2)
    monkeypatch.setattr(steps, "CONTEXTS", (32, 4096))
    check = Check(path=bundle, large_bundle=bundle)
    free = cuda.free
    assert run_step("opening", check, time.monotonic() + 300)["status"] == "passed"
    monkeypatch.setattr(large, "_STEPS", (steps.plans, steps.opening, steps.times))  # no gigabyte
    found = run_step("large", check, time.monotonic() + 300)
    assert found["status"] == "passed", found
    gc.collect()
    assert cuda.free == free
    assert set(found["figures"]["tokens_per_s"]) == {"context 32"}
    assert len(found["figures"]["tokens_per_s"]["context 32"]["acceptance 0.8"]) == 4
    assert "tokens_per_s" in readable(bundle, {"large": found})


def test_a_captured_round_is_one_launch_and_one_copy_each_way(bundle: Path, cuda: FakeCuda) -> None:
    check = Check(path=bundle)
    subject = check.subject
    captured = subject.captured()
    uniforms = uniform_table(0, 129)
    prompt = [5, 9, 14, 3]
    subject.rounds.begin(GREEDY, prompt)
    tokens = [*prompt, *subject.rounds.prefill(list(prompt), uniforms).tokens]
    subject.rounds.drafter.catch_up(tokens, 3)  # type: ignore[union-attr]
    inputs = RoundInputs(
        tokens=tokens, draft_rows=len(tokens) - 2, uniforms=uniforms, params=GREEDY
    )
    captured.run(inputs, 3)
    launches, cuda.copies = cuda.launches, []
    captured.run(inputs, 3)
    assert cuda.launches == launches + 1
    assert cuda.copies.count("up") == 1
    assert cuda.copies.count("down") == 1
    check.close()


def test_everything_is_freed(bundle: Path, cuda: FakeCuda) -> None:
    free = cuda.free
    with Decoder.load(bundle) as decoder:
        decoder.generate("abc", GREEDY)
        assert cuda.free < free
    del decoder
    gc.collect()
    assert not cuda.blocks
    assert cuda.free == free


def test_too_little_memory_is_told_before_anything_is_allocated(
    bundle: Path, cuda: FakeCuda
) -> None:
    cuda.free = 1 << 20
    with pytest.raises(EngineError, match=r"received 1,048,576 free bytes. Expected 2\d\d,\d{3},"):
        Decoder.load(bundle)
    assert not cuda.blocks


def test_another_gpu_or_version_is_told_before_anything_is_allocated(
    bundle: Path, cuda: FakeCuda
) -> None:
    manifest = Bundle.load(bundle).manifest
    card = manifest.engines
    assert card is not None
    other = replace(manifest, engines=replace(card, compute_capabilities=(120,)))
    with pytest.raises(BundleError, match=r"plans for compute capability 120. Expected 89"):
        Device(bundle, other)
    newer = replace(manifest, engines=replace(card, version="9.9"))
    with pytest.raises(BundleError, match=r"received version 0.0. Expected 9.9"):
        Device(bundle, newer)
    assert not cuda.blocks


def test_a_call_beyond_the_profiles_is_an_error(bundle: Path, cuda: FakeCuda) -> None:
    check = Check(path=bundle)
    target = check.subject.rounds.target
    call = target._bind(np.zeros((1, 200), np.int64), 1)
    with pytest.raises(
        EngineError, match=r"target\.plan: input_ids: received \[1, 200\]. Expected"
    ):
        call.run()
    check.close()


def _start(bundle: Path, cuda: FakeCuda) -> tuple[tuple[int, ...], int]:
    """The tokens of one request, and how many shapes were compiled for it."""
    before = cuda.compiled
    with Decoder.load(bundle) as decoder:
        tokens = decoder.generate("abcabc", GREEDY, num_draft_tokens=4).token_ids
    return tokens, cuda.compiled - before


def test_a_second_start_compiles_no_kernel(
    bundle: Path, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "not there yet"
    monkeypatch.setenv(VARIABLE, str(folder))
    tokens, compiled = _start(bundle, cuda)
    assert compiled > 0
    assert {one.name.split("-")[0] for one in folder.iterdir()} == {
        "target", "draft", "tail", "accept",
    }  # fmt: skip
    assert _start(bundle, cuda) == (tokens, 0)
    for one in folder.iterdir():
        one.write_bytes(one.read_bytes()[:9])
    assert _start(bundle, cuda) == (tokens, compiled), "broken files are no files"
    assert _start(bundle, cuda) == (tokens, 0)


def test_kernels_are_kept_though_a_process_is_killed_later(
    bundle: Path, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with Decoder.load(bundle) as decoder:
        decoder.generate("abcabc", GREEDY, num_draft_tokens=4)
        assert any(one.stat().st_size for one in tmp_path.glob("target-*-sm89.kernels"))


def test_nowhere_to_keep_kernels_is_told_and_costs_nothing_else(
    bundle: Path,
    cuda: FakeCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "below"))
    tokens, compiled = _start(bundle, cuda)
    assert caplog.text.count("name a folder in OUTRIDER_KERNELS") == 1
    assert _start(bundle, cuda) == (tokens, compiled)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]

    def homeless(_self: Path) -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(Path, "expanduser", homeless)
    caplog.clear()
    assert _start(bundle, cuda) == (tokens, compiled)
    assert not caplog.text


def test_the_real_library_keeps_kernels_as_the_stand_in_does() -> None:
    library = pytest.importorskip("tensorrt_rtx")
    for ours, theirs in (
        (FakeKernels, library.IRuntimeCache),
        (FakeConfig, library.IRuntimeConfig),
    ):
        for name in filter(lambda name: not name.startswith("_"), vars(ours)):
            assert hasattr(theirs, name), name
    assert hasattr(library.IRuntimeConfig, "dynamic_shapes_kernel_specialization_strategy")
    assert hasattr(library.DynamicShapesKernelSpecializationStrategy, "EAGER")


@pytest.mark.skipif(has_cuda(), reason="this machine has a driver: the calls would do something")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cudaMalloc", (16,)),
        ("cudaFree", (0,)),
        ("cudaHostAlloc", (16, 0)),
        ("cudaFreeHost", (0,)),
        ("cudaMemsetAsync", (4096, 0, 16, "cudaStream_t")),
        ("cudaMemcpyAsync", (4096, 8192, 16, "cudaMemcpyHostToDevice", "cudaStream_t")),
        (
            "cudaMemcpy2DAsync",
            (4096, 64, 8192, 64, 16, 3, "cudaMemcpyDeviceToDevice", "cudaStream_t"),
        ),
        ("cudaStreamCreateWithFlags", ("cudaStreamNonBlocking",)),
        ("cudaStreamSynchronize", ("cudaStream_t",)),
        ("cudaStreamDestroy", ("cudaStream_t",)),
        ("cudaStreamBeginCapture", ("cudaStream_t", "cudaStreamCaptureModeThreadLocal")),
        ("cudaStreamEndCapture", ("cudaStream_t",)),
        ("cudaGraphInstantiate", ("cudaGraph_t", 0)),
        ("cudaGraphLaunch", ("cudaGraphExec_t", "cudaStream_t")),
        ("cudaGraphDestroy", ("cudaGraph_t",)),
        ("cudaGraphExecDestroy", ("cudaGraphExec_t",)),
        ("cudaMemGetInfo", ()),
        ("cudaGetDeviceCount", ()),
        ("cudaGetDeviceProperties", (0,)),
        ("cudaSetDevice", (0,)),
    ],
)
def test_the_real_package_takes_what_the_stand_in_takes(
    name: str, arguments: tuple[object, ...]
) -> None:
    """Without a driver a call with the right arguments says that there is none."""
    driver = Driver()
    given = [_real(driver.api, one) if isinstance(one, str) else one for one in arguments]
    with pytest.raises(EngineError, match=r"Expected an NVIDIA GPU with its driver"):
        driver.call(name, *given)
    assert hasattr(FakeCuda, name)


def _real(api: object, name: str) -> object:
    for owner in ("cudaMemcpyKind", "cudaStreamCaptureMode"):
        if hasattr(getattr(api, owner), name):
            return getattr(getattr(api, owner), name)
    found = getattr(api, name)
    return found(0) if isinstance(found, type) else found
