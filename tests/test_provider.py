"""Bundles for ONNX Runtime's CUDA provider: built here, and run here by the very same code.

The device of its OrtValues is a value, so the binding, the copies and the buckets are exercised on
the CPU. What the provider itself does is for `scripts/gpu_check --onnx-bundle`, on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from family_configs import FAMILIES, MAX_CONTEXT, Family
from family_configs import VOCAB as FAMILY_VOCAB
from helpers_family import CHUNKS, bind, eager_logits, portable_graph, text
from tiny_checkpoints import random_model
from typer.testing import CliRunner

from engines.external_data import WeightStore, save
from engines.onnxruntime_cuda.kernels import check_kernels
from engines.onnxruntime_cuda.lowering import lower, lower_exactly
from export.build import BuildRequest, build
from export.cli import app
from export.gates import relative_error
from export.provider_graphs import ProviderGateGraph
from export.trace import cache_spec
from runtime import Decoder, SamplingParams, engine, engine_contract
from runtime.bundle import Bundle
from runtime.errors import BuildError, BundleError, EngineError
from runtime.provider import sessions
from runtime.provider.call import NOT_CAPTURED
from runtime.provider.executor import DecoderExecutor
from runtime.provider.graphs import ProviderGraphs
from runtime.provider.sessions import CUDA, HOST, Provider, open_session
from runtime.provider.values import DeviceValues
from runtime.split_draft import SplitDraft
from scripts.gpu import ort_cuda, steps
from scripts.gpu.check import run_step
from scripts.gpu.steps import STEPS, Check

GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_k=30, seed=5)


def _build(out: Path, target: Path, draft: Path | str | None, **options: object) -> Path:
    request = BuildRequest(
        target=str(target),
        draft=str(draft) if draft else None,
        out=out,
        backend="onnxruntime-cuda",
        precision="fp16",
        max_draft_tokens=4,
    )
    return build(replace(request, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["fp16", "int8", "int4"])
def bundle(
    request: pytest.FixtureRequest,
    kept_traces: None,
    build_root: Path,
    tiny_target: Path,
    tiny_draft: Path,
) -> Path:
    out = build_root / f"provider-{request.param}"
    return _build(out, tiny_target, tiny_draft, precision=request.param)


@pytest.fixture(scope="module", autouse=True)
def small_buckets() -> Iterator[None]:
    """Context buckets of 32, 64 and 128 rows."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine_contract, "LEAST_CONTEXT", 32)
        yield


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such bundles open on the CPU provider."""
    monkeypatch.setattr(engine, "open_graphs", partial(ProviderGraphs, provider=HOST))


def test_a_bundle_is_complete(bundle: Path) -> None:
    manifest = Bundle.load(bundle).manifest
    assert (manifest.backend, manifest.engines) == ("onnxruntime-cuda", None)
    graphs = {f"onnx/{name}.onnx" for name in ("target", "draft", "tail", "accept")}
    assert graphs <= set(manifest.files)
    assert manifest.target.cache.dtype == manifest.draft_model.cache.dtype == "float16"  # type: ignore[union-attr]
    gates = {gate.name: gate for gate in manifest.gates}
    assert set(gates) == {"target parity", "rows", "rollback", "engine", "draft parity"}
    assert all(gate.status == "passed" for gate in gates.values())
    assert 1e-6 < gates["engine"].figures["relative_error"] < 0.05, "fp16 was computed in fp16"  # type: ignore[operator]


def test_graphs_are_fp16_and_compute_with_no_size(bundle: Path) -> None:
    for name in ("target", "draft"):
        model = ir.load(bundle / "onnx" / f"{name}.onnx")
        check_kernels(name, model)
        assert model.graph.opset_imports[""] == 18
        assert not {"Shape", "Range", "Loop"} & {node.op_type for node in model.graph}
        floats = {
            v.dtype
            for v in model.graph.inputs
            if v.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)
        }
        assert floats == {ir.DataType.FLOAT16}, "the caches"
        (logits,) = (v for v in model.graph.outputs if v.name == "logits")
        assert logits.dtype == ir.DataType.FLOAT


def test_without_the_provider_it_says_what_to_install(bundle: Path) -> None:
    """This environment has onnxruntime alone."""
    with pytest.raises(
        EngineError,
        match=r"received onnxruntime .* with .*CPUExecutionProvider\. "
        r"Expected CUDAExecutionProvider; uninstall onnxruntime, then pip",
    ):
        Decoder.load(bundle)


def test_a_provider_that_does_not_load_is_told_by_what_it_lacks(tmp_path: Path) -> None:
    """As the dynamic linker says it; ONNX Runtime itself would go on without the provider."""
    (tmp_path / "libonnxruntime_providers_cuda.so").write_bytes(b"no library")
    with pytest.raises(EngineError, match=r"a CUDA provider that doesn't load \(.+\)\. Expected"):
        sessions._load_library(tmp_path)


def test_no_session_falls_back_to_the_cpu(bundle: Path) -> None:
    """The real package, asked for a provider that it hasn't got."""
    with pytest.raises(EngineError, match=r"target\.onnx: CUDAExecutionProvider refused the graph"):
        open_session(CUDA, bundle / "onnx" / "target.onnx", {}, captured=False)


def test_a_session_on_another_provider_is_an_error(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it came about that ONNX Runtime took another."""
    import onnxruntime as ort

    monkeypatch.setattr(ort.InferenceSession, "get_providers", lambda _: ["CPUExecutionProvider"])
    other = Provider(name="Else", device="cpu", captures=False)
    monkeypatch.setattr(ort.InferenceSession, "__init__", lambda self, *_, **__: None)
    with pytest.raises(EngineError, match=r"a session on CPUExecutionProvider\. Expected Else"):
        open_session(other, bundle / "onnx" / "target.onnx", {}, captured=False)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_it_decodes(bundle: Path, on_host: None, params: SamplingParams) -> None:
    with Decoder.load(bundle) as decoder:
        drafted = decoder.generate("abcabc", params, num_draft_tokens=4)
        assert decoder.stats is not None
        assert decoder.stats.num_accepted_draft_tokens > 0
        again = decoder.generate("abcabc", params, num_draft_tokens=4)
        plain = decoder.generate("abcabc", params, num_draft_tokens=0)
    assert len(drafted.token_ids) == 24
    assert drafted.token_ids == again.token_ids
    if params is GREEDY:
        assert drafted.token_ids == plain.token_ids


def test_its_text_is_the_cpu_backends(
    kept_traces: None,
    build_root: Path,
    tiny_target: Path,
    tiny_draft: Path,
    fp32_bundle: Path,
    on_host: None,
) -> None:
    """fp16 against fp32: no choice of this text is near a tie."""
    path = _build(build_root / "provider-text", tiny_target, tiny_draft)
    with Decoder.load(path) as decoder:
        found = decoder.generate("abcabc", GREEDY, num_draft_tokens=3).token_ids
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.undo()
        monkeypatch.setattr(engine, "open_graphs", lambda path, _: engine._OnnxGraphs(path))
        with Decoder.load(fp32_bundle) as decoder:
            assert found == decoder.generate("abcabc", GREEDY, num_draft_tokens=0).token_ids


def test_long_texts_go_through_every_bucket(bundle: Path, on_host: None) -> None:
    params = replace(GREEDY, max_tokens=110, min_tokens=110)  # whatever ends earlier
    with Decoder.load(bundle) as decoder:
        drafted = decoder.generate("abc", params, num_draft_tokens=3).token_ids
        call = decoder.rounds.target._verify[3]
        assert set(call._prepared) == {32, 64, 128}  # type: ignore[attr-defined]
        assert drafted == decoder.generate("abc", params, num_draft_tokens=0).token_ids


def test_penalties_and_bans_reach_the_device(bundle: Path, on_host: None) -> None:
    with Decoder.load(bundle) as decoder:
        free = decoder.generate("abc", GREEDY, num_draft_tokens=0).token_ids
        banned = replace(GREEDY, banned_tokens=tuple(set(free)), repetition_penalty=1.3)
        for k in (0, 3):
            found = decoder.generate("abc", banned, num_draft_tokens=k).token_ids
            assert not set(found) & set(free)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_bundles_without_a_draft_model(
    kept_traces: None, build_root: Path, tiny_target: Path, on_host: None, draft: str | None
) -> None:
    found = _build(build_root / f"provider-{draft}", tiny_target, draft)
    with Decoder.load(found) as decoder:
        plain = decoder.generate("abcabcabc", GREEDY, num_draft_tokens=0).token_ids
        assert len(plain) == 24
        if draft:
            drafted = decoder.generate("abcabcabc", GREEDY, num_draft_tokens=4)
            assert drafted.token_ids == plain


def test_a_captured_graph_serves_one_call_and_one_bucket(
    kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path
) -> None:
    """Two calls that shared a number would replay each other's addresses and lengths."""
    path = _build(build_root / "provider-captures", tiny_target, tiny_draft)
    manifest = Bundle.load(path).manifest
    graphs = ProviderGraphs(path, manifest, replace(HOST, captures=True))
    rounds = engine.load_rounds(path, manifest, engine.EngineOptions(), graphs)
    step = rounds.target
    for rows in (1, 3, 5):
        for length in (4, 40, 100):
            step.length = length
            step.verify(rows)
    step.length = 0
    step.prefill(list(range(3, 40)))  # a prompt's length seldom comes twice
    numbers = [p.graph for call in step._verify for p in call._prepared.values()]  # type: ignore[attr-defined]
    assert len(numbers) == len(set(numbers)) == 9
    assert min(numbers) > 0
    prompts = [p.graph for call in step._calls.values() for p in call._prepared.values()]  # type: ignore[attr-defined]
    assert prompts == [NOT_CAPTURED]
    draft = rounds.drafter._executor  # type: ignore[union-attr]
    assert isinstance(draft, SplitDraft)
    assert isinstance(draft.decoder, DecoderExecutor)
    assert draft.decoder._session is not step._executor._session  # type: ignore[attr-defined]


def test_every_input_that_changes_is_read_anew(bundle: Path) -> None:
    """No copy is left out because an earlier one was made: all inputs of accept, one by one."""
    manifest = Bundle.load(bundle).manifest
    graphs = ProviderGraphs(bundle, manifest, HOST)
    rounds = engine.load_rounds(bundle, manifest, engine.EngineOptions(), graphs)
    b, vocab = rounds.buffers, manifest.target.vocab_size
    rounds.begin(SamplingParams(temperature=1.0), [1])
    rng = np.random.default_rng(0)
    for _ in range(30):
        b.logits[:] = rng.normal(size=b.logits.shape)
        b.draft_probs[:] = rng.dirichlet(np.ones(b.draft_probs.shape[2]), b.draft_probs.shape[:2])
        b.draw_uniforms[:] = rng.random(b.draw_uniforms.shape)
        b.accept_uniforms[:] = 0.999999  # nothing is accepted but by chance
        graphs.upload(b.logits)
        graphs.upload(b.draft_probs)
        rounds.accept.decide(0)
        weights = np.exp(b.logits[0, 0] - b.logits[0, 0].max(), dtype=np.float64)
        at = np.cumsum(weights) / weights.sum()
        expected = min(int(np.searchsorted(at, b.draw_uniforms[0, 0], side="right")), vocab - 1)
        assert abs(int(b.next_token[0]) - expected) <= 1, "rounding moves an edge by one token"


def test_views_share_the_value_of_what_they_look_into() -> None:
    values = DeviceValues(HOST)
    whole = np.arange(12, dtype=np.int64).reshape(3, 4)
    row = whole[1:2, 2:]
    assert values.of(row) is values.of(whole)
    assert values.address(row) - values.address(whole) == 6 * whole.itemsize
    whole[1, 2] = 99
    values.of(whole).upload()
    assert values.of(whole).value.numpy().ravel()[6] == 99
    values.of(whole).value.update_inplace(np.zeros(12, np.int64))
    values.of(row).download()
    assert not whole.any()
    whole[0, 0] = 0  # as the device has it: nothing to copy
    values.of(whole).upload()
    assert not values.of(whole).value.numpy().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, r"--precision: received 'fp8'. Expected one of fp16, int8, int4"),
        ({"draft_precision": "bf16"}, r"--draft-precision: received 'bf16'"),
        ({"max_tree_nodes": 8}, r"--max-tree-nodes: received 8 with --backend onnxruntime-cuda"),
        ({"draft": "layer-skip", "skip_layers": "1"}, r"--draft: received .* onnxruntime-cuda"),
        ({"compute_capabilities": (89,)}, r"--compute-capability: received it with --backend"),
        ({"draft_backend": "onnxruntime"}, r"--draft-backend: received it with --backend"),
    ],
)
def test_what_it_does_not_build(
    tmp_path: Path, tiny_target: Path, tiny_draft: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        _build(tmp_path / "no", tiny_target, options.pop("draft", tiny_draft), **options)  # type: ignore[arg-type]
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=pytest.mark.slow if f.name == "gemma2" else (), id=f.name)
        for f in FAMILIES
        if f.name in ("gpt2", "qwen3", "gemma2")
    ],
)
def test_a_family_is_itself_without_a_size(family: Family, tmp_path: Path) -> None:
    """Learned positions and tanh's Gelu; norms of queries and keys; windows and soft caps."""
    config = family.config()
    model = random_model(config)
    exact = portable_graph(config, MAX_CONTEXT)
    bind(exact, model)
    half = exact.clone()
    lower_exactly(exact, None)
    lower(half, None)
    check_kernels(family.name, half)
    tokens = text(sum(CHUNKS), FAMILY_VOCAB)
    expected = eager_logits(model, tokens)
    for graph, dtype, limit in ((exact, "float32", 2e-5), (half, "float16", 1e-2)):
        path = save(graph, dtype, WeightStore(directory=tmp_path))
        cache = replace(cache_spec(config, MAX_CONTEXT), dtype=dtype)
        found = ProviderGateGraph(path, cache, FAMILY_VOCAB).in_chunks(tokens)
        assert relative_error(found, expected) < limit


@pytest.mark.parametrize(
    ("op_type", "dtype", "why"),
    [
        ("Shape", "FLOAT", "Shape, which is computed on the CPU"),
        ("Multinomial", "FLOAT", "Multinomial, which has no kernel"),
        ("ArgMax", "INT64", "ArgMax over int64, which has no kernel"),
    ],
)
def test_a_node_without_a_kernel_stops_the_build(op_type: str, dtype: str, why: str) -> None:
    x = ir.val("x", ir.DataType[dtype], [2, 3])
    node = ir.node(op_type, [x])
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 18}, name="g")
    with pytest.raises(BuildError, match=f"received g.onnx with {why}. Expected operators"):
        check_kernels("g.onnx", ir.Model(graph, ir_version=10))


def test_an_older_gpu_package_than_the_builds_is_enough(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels were read for 1.31; the CPU package that builds may be newer."""
    from runtime import bundle as module

    monkeypatch.setattr(module, "_installed_version", lambda: "1.31.1")
    Bundle.load(bundle)
    monkeypatch.setattr(module, "_installed_version", lambda: "1.30.0")
    with pytest.raises(BundleError, match=r"received version 1.30.0. Expected 1.31 or newer"):
        Bundle.load(bundle)


def test_the_gpu_check_runs_the_backend_as_it_decodes(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "ROUNDS", 20)
    monkeypatch.setattr(steps, "REPEATS", 2)
    monkeypatch.setattr(steps, "CONTEXTS", (32,))
    figures = ort_cuda.measure(bundle, HOST)
    for found in figures.values():
        assert set(found) == {step.__name__ for step in steps.COMMON}
        assert not [name for name, one in found.items() if "skipped" in one]
        assert found["captured"]["accepted"] > 0
        assert found["target"]["relative_error"] > 1e-6
    check = Check(path=bundle, open_with=partial(ProviderGraphs, provider=HOST))
    for name in ("plans", "aliasing", "bandwidth", "second start"):
        assert run_step(name, check, time.monotonic() + 60)["status"] == "skipped", name
    assert set(STEPS) >= {"onnxruntime-cuda"}


def test_inspect_says_the_backend(bundle: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["inspect", str(bundle), "--json"]).output)
    assert found["backend"] == "onnxruntime-cuda"
    assert dataclasses.is_dataclass(CUDA)
