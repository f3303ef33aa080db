"""Whole bundles of engines, built without a GPU; what a machine without one says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import llama_config, save
from typer.testing import CliRunner

from engines.tensorrt.build import BuildOptions, build_plan
from engines.tensorrt.package import load
from engines.tensorrt.ranges import target_profiles
from export.build import BuildRequest, build
from export.calibrated import CalibrationRequest
from export.checkpoint import open_checkpoint
from export.cli import app
from export.engine_gates import exact_states
from export.engine_graphs import write_target_graph
from export.engine_precision import engine_precision
from export.ranking_gate import ranking
from runtime import Decoder
from runtime.bundle import Bundle
from runtime.cuda.driver import Gpu
from runtime.cuda.plan import Shapes, check_gpu, check_version, choose_profile
from runtime.errors import BuildError, BundleError, EngineError, GateFailed
from runtime.manifest import EngineCard, Limits, Manifest
from runtime.tree_contract import TREE_GRAPHS

rtx = pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)


def _request(out: Path, target: Path, draft: Path | None, **options: object) -> BuildRequest:
    request = BuildRequest(
        target=str(target),
        draft=str(draft) if draft else None,
        out=out,
        backend="tensorrt-rtx",
        precision="fp16",
        compute_capabilities=(89,),
        max_draft_tokens=4,
    )
    return replace(request, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engines(kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path) -> Path:
    return build(_request(build_root / "engines", tiny_target, tiny_draft))


def test_a_bundle_of_engines_is_complete(engines: Path) -> None:
    bundle = Bundle.load(engines)
    manifest = bundle.manifest
    assert manifest.backend == "tensorrt-rtx"
    assert manifest.engines == EngineCard(
        package="tensorrt-rtx",
        version=rtx.__version__,
        compute_capabilities=(89,),
        draft_backend="tensorrt-rtx",
    )
    plans = {f"engines/{name}.plan" for name in ("target", "draft", "tail", "accept")}
    assert plans <= set(manifest.files)
    assert not [name for name in manifest.files if name.endswith((".onnx", ".data"))]
    assert manifest.target.cache.dtype == "float16"
    assert bundle.latency is None, "nothing was run, so nothing was measured"


def test_its_graphs_were_held_against_the_checkpoints(engines: Path) -> None:
    gates = {gate.name: gate for gate in Bundle.load(engines).manifest.gates}
    assert set(gates) == {"target parity", "rows", "rollback", "engine", "draft parity"}
    assert all(gate.status == "passed" for gate in gates.values())
    noise = gates["engine"].figures["relative_error"]
    assert isinstance(noise, float)
    assert 1e-6 < noise < 0.05, "fp16 was computed in fp16"


def test_inspect_says_what_the_plans_are_for(engines: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(engines)])
    assert result.exit_code == 0, result.output
    for text in (f"tensorrt-rtx {rtx.__version__}", "SM89", "draft runs on"):
        assert text in result.output
    found = json.loads(CliRunner().invoke(app, ["inspect", str(engines), "--json"]).output)
    assert found["engines"]["compute_capabilities"] == [89]


def test_a_machine_without_a_driver_says_so_once(engines: Path) -> None:
    """The driver is what lacks here; where it is there, this machine runs the tests marked gpu."""
    if _has_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError, match=r"^CUDA: received cudaError\w+ .*Expected an NVIDIA GPU"):
        Decoder.load(engines)


def _has_gpu() -> bool:
    from runtime.cuda.driver import Driver

    try:
        Driver().gpu()
    except EngineError:
        return False
    return True


def test_the_draft_may_run_on_the_cpu(
    kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path
) -> None:
    asked = _request(
        build_root / "beside", tiny_target, tiny_draft, precision="int8",
        draft_backend="onnxruntime",
    )  # fmt: skip
    manifest = Bundle.load(build(asked)).manifest
    assert {"engines/target.plan", "engines/accept.plan", "onnx/draft.onnx"} <= set(manifest.files)
    assert "engines/draft.plan" not in manifest.files
    assert manifest.engines is not None
    assert manifest.engines.draft_backend == "onnxruntime"
    assert (manifest.target.precision, manifest.draft_model.precision) == ("int8", "int8")  # type: ignore[union-attr]
    assert manifest.draft_model.cache.dtype == "float32"  # type: ignore[union-attr]


def test_a_bundle_that_makes_trees_is_complete(
    kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path
) -> None:
    """Target, branch and accept take trees of 12 drafts, by the library's own builds."""
    asked = _request(build_root / "tree-engines", tiny_target, tiny_draft, max_tree_nodes=12)
    bundle = Bundle.load(build(asked))
    names = ("target", "draft", "branch", "accept", *TREE_GRAPHS)
    plans = {f"engines/{name}.plan" for name in names}
    assert plans <= set(bundle.manifest.files)
    assert bundle.manifest.limits.max_tree_nodes == 12
    gates = {gate.name: gate for gate in bundle.manifest.gates}
    assert gates["branch"].status == "passed"
    assert gates["branch"].figures["rows"] > 0  # type: ignore[operator]


def test_models_of_many_layers_build(build_root: Path, tmp_path: Path) -> None:
    """TensorRT-RTX 1.7's builder crashes on a graph that has a Loop and ten caches or more: no
    decoder has one, be it a target's, a draft's, or what makes its trees."""
    deep = tmp_path / "deep"
    save(deep, llama_config(num_hidden_layers=6, head_dim=64))
    asked = _request(build_root / "deep", deep, deep, max_tree_nodes=6, max_draft_tokens=2)
    bundle = Bundle.load(build(asked))
    names = ("target", "draft", "tail", "branch", "accept")
    assert {f"engines/{name}.plan" for name in names} <= set(bundle.manifest.files)


def test_a_target_that_gives_its_states_builds(tiny_target: Path, tmp_path: Path) -> None:
    """What heads beside the engine start from: one more output, widened as the logits are."""
    limits = Limits(max_batch=1, max_context=128, max_draft_tokens=4, max_tree_nodes=12)
    checkpoint = open_checkpoint(str(tiny_target))
    graph = write_target_graph(
        checkpoint, engine_precision("fp16"), 128, tmp_path, taps=(1, 2), trees=True
    )
    plan = build_plan(
        load("tensorrt-rtx"),
        graph.path,
        target_profiles(limits),
        BuildOptions(compute_capabilities=(89,)),
    )
    assert len(plan.data) > plan.weight_bytes
    assert exact_states(graph, [3, 5, 7]).shape == (3, 128)


def test_a_ranking_that_is_not_the_drafts_fails_the_build() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(40), 5).astype(np.float32)
    ids = np.arange(40) * 2
    order = np.argsort(-probs, axis=1)[:, :8]
    tops = np.take_along_axis(probs, order, axis=1)
    assert ranking(ids[order], tops, probs, ids).status == "passed"
    with pytest.raises(GateFailed, match=r"gate branch: received a ranking"):
        ranking(ids[order], tops[::-1], probs, ids)
    with pytest.raises(GateFailed, match=r"gate branch: received a ranking"):
        ranking(ids[order[:, ::-1]], tops, probs, ids)


def test_weights_of_fp4_build(kept_traces: None, tiny_target: Path, tmp_path: Path) -> None:
    """ONNX Runtime's CPU can't dequantize them: parity is judged on the weights unpacked."""
    asked = _request(
        tmp_path / "bundle", tiny_target, None, precision="fp4", compute_capabilities=(120,)
    )
    gates = {gate.name: gate for gate in Bundle.load(build(asked)).manifest.gates}
    assert gates["engine"].status == "skipped"
    assert "no kernels for fp4" in gates["engine"].reason
    assert gates["target parity"].status == gates["rows"].status == "passed"
    assert float(gates["target parity"].figures["relative_error"]) < 1e-4
    assert float(gates["target parity"].figures["drift_kl"]) > 1e-5, "weights were rounded"


@pytest.fixture
def calibration(tmp_path: Path) -> CalibrationRequest:
    return CalibrationRequest(cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("precision", "draft_precision"), [("int8-smoothquant", "int8"), ("fp8", "fp8-weight")]
)
def test_inputs_are_rounded_by_calibrated_scales(
    kept_traces: None,
    tiny_target: Path,
    tiny_draft: Path,
    calibration: CalibrationRequest,
    tmp_path: Path,
    precision: str,
    draft_precision: str,
) -> None:
    """Parity is exact for the rounded weights; inputs are rounded by what is called the engine."""
    asked = _request(
        tmp_path / "bundle", tiny_target, tiny_draft, precision=precision, calibration=calibration
    )
    bundle = Bundle.load(build(asked))
    manifest = bundle.manifest
    gates = {gate.name: gate for gate in manifest.gates}
    assert {gate.status for gate in gates.values()} == {"passed"}
    assert float(gates["target parity"].figures["relative_error"]) < 1e-4
    assert 0.005 < float(gates["engine"].figures["relative_error"]) < 0.3
    assert manifest.target.precision == precision
    assert manifest.draft_model is not None
    assert manifest.draft_model.precision == draft_precision
    report = json.loads((bundle.path / "reports" / "calibration.json").read_text())
    assert report["recipe"] == precision
    assert len(report["input_scale"]) == 2 * 4, "all layers but the head"
    told: list[str] = []
    build(replace(asked, out=tmp_path / "again"), told.append)
    assert any("calibrated before" in line for line in told)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp7"}, r"--precision: received 'fp7'. Expected one of fp16, bf16, int8"),
        ({"draft_precision": "fp32"}, r"--draft-precision: received 'fp32'"),
        ({"compute_capabilities": (90,)}, r"--compute-capability: received 90"),
        ({"draft_backend": "elsewhere"}, r"--draft-backend: received 'elsewhere'"),
        (
            {"precision": "fp8", "compute_capabilities": (80,)},
            r"--precision: received FLOAT8E4M3FN weights for compute capability 80",
        ),
        ({"draft_precision": "fp8"}, r"--draft-precision: received 'fp8', which calibrates"),
        ({"precision": "fp32"}, r"'fp32'. Expected .*, or --backend onnxruntime for fp32"),
        ({"precision": "int4-128"}, r"int4-128.*no layer"),
        ({"draft": "layer-skip", "skip_layers": "1"}, r"--draft: received .* with --backend"),
        ({"backend": "tensorrt"}, r"--backend tensorrt: received no usable package"),
        (
            {"backend": "onnxruntime", "precision": "int8"},
            r"--compute-capability: received it with --backend onnxruntime",
        ),
    ],
)
def test_what_engines_cannot_do_is_refused(
    kept_traces: None,
    tmp_path: Path,
    tiny_target: Path,
    tiny_draft: Path,
    options: dict[str, object],
    message: str,
) -> None:
    out = tmp_path / "bundle"
    with pytest.raises(BuildError, match=message):
        build(replace(_request(out, tiny_target, tiny_draft), **options))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["int4-gptq", "int4-awq"])
def test_codes_that_calibration_chose_are_carried(
    kept_traces: None,
    tiny_target: Path,
    tiny_draft: Path,
    calibration: CalibrationRequest,
    tmp_path: Path,
    precision: str,
) -> None:
    """The exact graph is the eager model with these codes, AWQ's factors undone.

    Rows of 32 features are no whole block of 64: they have 8 bits, and their factors all the same.
    """
    asked = _request(
        tmp_path / "bundle", tiny_target, tiny_draft, precision=precision, calibration=calibration
    )
    bundle = Bundle.load(build(asked))
    gates = {gate.name: gate for gate in bundle.manifest.gates}
    assert {gate.status for gate in gates.values()} == {"passed"}
    assert float(gates["target parity"].figures["relative_error"]) < 1e-4
    drift = float(gates["target parity"].figures["drift_kl"])
    assert 1e-4 < drift < 0.3
    assert bundle.manifest.draft_model is not None
    assert bundle.manifest.draft_model.precision == "int4"
    report = json.loads((bundle.path / "reports" / "calibration.json").read_text())
    assert len(report["output_error"]) == 2 * 4


CARD = EngineCard(
    package="tensorrt-rtx",
    version="1.7.1.116",
    compute_capabilities=(80, 89),
    draft_backend="tensorrt-rtx",
)


def test_plans_of_another_version_or_gpu_are_refused() -> None:
    check_version(CARD, "1.7.1.116")
    with pytest.raises(BundleError, match=r"received version 1.8.0. Expected 1.7.1.116"):
        check_version(CARD, "1.8.0")
    gpu = Gpu(index=0, name="NVIDIA H200", compute_capability=90)
    with pytest.raises(BundleError, match=r"received plans for compute capability 80, 89. .* 90,"):
        check_gpu(CARD, gpu)
    check_gpu(replace(CARD, compute_capabilities=()), gpu)


def test_shapes_outside_every_profile_are_named() -> None:
    held = [{"x": Shapes(least=(1, 1), most=(1, 1))}, {"x": Shapes(least=(1, 2), most=(2, 9))}]
    assert choose_profile("t.plan", held, {"x": (1, 1)}) == 0
    assert choose_profile("t.plan", held, {"x": (2, 9)}) == 1
    with pytest.raises(EngineError, match=r"t\.plan: x: received \[1, 10\]. Expected \[1, 1\] to"):
        choose_profile("t.plan", held, {"x": (1, 10)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "onnxruntime"}, r"engines: received 'tensorrt-rtx' with backend"),
        ({"engines": None}, r"onnx/target\.onnx"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    engines: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    import shutil

    copy = shutil.copytree(engines, tmp_path / "copy")
    raw = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(raw | change))
    with pytest.raises(BundleError, match=message):
        Bundle.load(copy)
    assert Manifest.from_json(json.dumps(raw)).engines is not None
