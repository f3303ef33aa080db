"""Calibrated weights: codes that serve the layer's output, and the way from text to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers_build import K
from helpers_calibration import changed_tensor, weight_errors
from typer.testing import CliRunner

from calibration import collect as collecting
from calibration import solve as solving
from calibration.answers import ANSWER_TOKENS, Writer
from calibration.block_quantization import BlockFormat, dequantize, quantize
from calibration.collect import Calibration, collect, groups
from calibration.comparison.graphs import CachedGraph
from calibration.gptq import gptq
from calibration.sites import ReferenceGraph
from calibration.statistics import BINS, Hessian, Ranges
from export.build import BuildRequest, build
from export.calibrated import CalibrationRequest
from export.cli import app
from runtime.bundle import Bundle
from runtime.errors import BuildError, EngineError, InvalidRequest
from runtime.executor import EngineOptions

FORMATS = [
    BlockFormat(bits=4, block=32, symmetric=True),
    BlockFormat(bits=4, block=64, symmetric=True, half_scales=True),
    BlockFormat(bits=4, block=32, symmetric=False),
]


def random_weight(features: int) -> np.ndarray:
    return np.random.default_rng(features).standard_normal((40, features)).astype(np.float32)


def random_hessian(features: int, rows: int = 500) -> np.ndarray:
    """Of inputs whose features depend on each other, as real ones do."""
    rng = np.random.default_rng(features)
    mixing = rng.standard_normal((features, features))
    x = (rng.standard_normal((rows, features)) @ mixing).astype(np.float32)
    return x.T @ x


def output_error(weight: np.ndarray, rounded: np.ndarray, hessian: np.ndarray) -> float:
    off = (weight - rounded).astype(np.float64)
    return float(((off @ hessian) * off).sum())


# Codes


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("features", [96, 100])
def test_the_output_is_nearer_than_with_the_nearest_codes(features: int, fmt: BlockFormat) -> None:
    """Under two thirds of the error; about 0.47 was seen in each case."""
    weight, hessian = random_weight(features), random_hessian(features)
    errors = [
        output_error(weight, dequantize(made, fmt, features), hessian)
        for made in (gptq(weight, hessian, fmt), quantize(weight, fmt))
    ]
    assert errors[0] < 0.66 * errors[1]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_independent_inputs_give_the_nearest_codes(fmt: BlockFormat) -> None:
    """Nothing can make up for an error where features have nothing to do with each other."""
    weight = random_weight(100)
    made, nearest = gptq(weight, np.eye(100, dtype=np.float32) * 7, fmt), quantize(weight, fmt)
    np.testing.assert_array_equal(made.codes, nearest.codes)
    np.testing.assert_array_equal(made.scales, nearest.scales)


def test_features_that_were_never_seen_get_the_nearest_codes() -> None:
    weight, hessian, fmt = random_weight(96), random_hessian(96), FORMATS[0]
    hessian[10:20], hessian[:, 10:20] = 0, 0
    made = dequantize(gptq(weight, hessian, fmt), fmt, 96)
    np.testing.assert_array_equal(
        made[:, 10:20], dequantize(quantize(weight, fmt), fmt, 96)[:, 10:20]
    )


def test_little_text_is_no_failure() -> None:
    """H of three rows has rank 3."""
    weight, fmt = random_weight(96), FORMATS[0]
    made = dequantize(gptq(weight, random_hessian(96, rows=3), fmt), fmt, 96)
    assert np.isfinite(made).all()


def test_half_scales_are_numbers_of_half_precision() -> None:
    quantized = quantize(random_weight(96), FORMATS[1])
    np.testing.assert_array_equal(quantized.scales, quantized.scales.astype(np.float16))


# Statistics


def test_a_hessian_is_the_sum_over_all_rows() -> None:
    x = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)
    found = Hessian.empty(8)
    for part in np.split(x, 3):
        found.add(part)
    np.testing.assert_allclose(found.matrix, x.T @ x, rtol=1e-5)
    assert found.count == 30


def test_ranges_grow_with_the_values_and_lose_none() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 16)).astype(np.float32) * np.exp2(np.arange(64)[:, None] - 32)
    found = Ranges.empty(16)
    for row in x:
        found.add(row[None])
    np.testing.assert_array_equal(found.most, np.abs(x).max(0))
    assert found.counts.sum() == x.size
    assert found.limit / 2 <= np.abs(x).max() < found.limit
    width = found.limit / BINS
    expected = np.bincount(np.minimum(np.abs(x) / width, BINS - 1).astype(int).ravel())
    np.testing.assert_array_equal(found.counts[: len(expected)], expected)


@pytest.mark.parametrize("kind", [Hessian, Ranges])
def test_a_state_is_taken_up_again(kind: type[Hessian] | type[Ranges]) -> None:
    x = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)
    straight, first = kind.empty(8), kind.empty(8)
    straight.add(x[:10])
    straight.add(x[10:])
    first.add(x[:10])
    second = kind.of_state(first.state())
    second.add(x[10:])
    for name, array in straight.state().items():
        np.testing.assert_array_equal(second.state()[name], array)


# Reading texts


TEXTS = tuple(tuple((7 * i + j) % 250 for j in range(20 + i)) for i in range(6))


@pytest.fixture
def reference(fp32_bundle: Path) -> ReferenceGraph:
    return ReferenceGraph(fp32_bundle / "onnx" / "target.onnx")


@pytest.fixture
def calibration(fp32_bundle: Path, tmp_path: Path) -> Calibration:
    card = Bundle.load(fp32_bundle).manifest.target
    return Calibration(
        cache=card.cache,
        vocab=card.vocab_size,
        texts=TEXTS,
        work=tmp_path,
        options=EngineOptions(threads=1, spin=False),
        save_s=0.0,
    )


def test_every_product_is_a_site_and_one_is_the_head(reference: ReferenceGraph) -> None:
    """Two layers of packed q, k, v; o; packed gate and up; down; and the head."""
    assert len(reference.sites) == 2 * 4 + 1
    (head,) = [site for site in reference.sites if site.is_head]
    assert head.weight == "lm_head.weight"
    for site in reference.sites:
        assert reference.weight(site).shape == (site.rows, site.features)


def test_what_is_collected_is_what_the_layer_reads(
    reference: ReferenceGraph, calibration: Calibration
) -> None:
    """The first layer reads the embedding, normalized: each row has the norm's length."""
    first = reference.sites[0]
    found = collect(reference, [first], Hessian, calibration)[first.reads]
    assert found.count == sum(map(len, TEXTS))
    mean_square = found.matrix.trace() / found.count / first.features
    assert mean_square == pytest.approx(1.0, rel=0.01)  # the norm's weights are ones
    assert not list(reference.path.parent.glob("*.watched.onnx"))


def test_groups_by_memory_give_the_same(
    reference: ReferenceGraph, calibration: Calibration
) -> None:
    sites = reference.sites
    size = Hessian.size_bytes(sites[0].features)
    parts = groups(sites, Hessian, 2 * size)
    assert [site for part in parts for site in part] == sites
    assert len(parts) > 2
    assert groups(sites, Hessian, 1 << 30) == [sites]
    whole = collect(reference, sites, Hessian, calibration)
    for part in parts:
        for name, found in collect(reference, part, Hessian, calibration).items():
            np.testing.assert_allclose(found.matrix, whole[name].matrix, rtol=1e-4, atol=1e-3)


def test_an_interrupted_run_goes_on_behind_the_last_text(
    reference: ReferenceGraph, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = reference.sites[:2]
    straight = collect(reference, sites, Hessian, calibration)
    (calibration.work / "hessian.npz").unlink()
    read: list[Sequence[int]] = []
    true_read = collecting._Reader.read

    def failing(self: object, text: Sequence[int]):  # type: ignore[no-untyped-def]
        if len(read) == 4:
            raise KeyboardInterrupt
        read.append(text)
        return true_read(self, text)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(collecting._Reader, "read", failing)
        with pytest.raises(KeyboardInterrupt):
            collect(reference, sites, Hessian, calibration)
    assert read == list(TEXTS[:4])
    more: list[Sequence[int]] = []

    def reading(self: object, text: Sequence[int]):  # type: ignore[no-untyped-def]
        more.append(text)
        return true_read(self, text)  # type: ignore[arg-type]

    monkeypatch.setattr(collecting._Reader, "read", reading)
    resumed = collect(reference, sites, Hessian, calibration)
    assert more == list(TEXTS[4:])
    for name in straight:
        np.testing.assert_array_equal(resumed[name].matrix, straight[name].matrix)


def test_activations_that_are_not_finite_name_the_layer(
    fp32_bundle: Path, calibration: Calibration, tmp_path: Path
) -> None:
    copied = shutil.copytree(fp32_bundle, tmp_path / "copy")
    name = "model.layers.1.mlp.down_proj.weight.T"
    changed_tensor(name, np.float32, lambda a: a * np.float32("nan"), "target")(copied)
    graph = ReferenceGraph(copied / "onnx" / "target.onnx")
    with pytest.raises(EngineError, match=r"lm_head.*not finite"):
        collect(graph, graph.sites, Hessian, calibration)
    with pytest.raises(EngineError, match=r"down_proj.*not finite"):
        graph.weight(next(site for site in graph.sites if "1.mlp.down" in site.weight))


# Texts that the reference writes


@pytest.fixture
def writer(fp32_bundle: Path, tmp_path: Path) -> Writer:
    card = Bundle.load(fp32_bundle).manifest.target
    return Writer(
        path=fp32_bundle / "onnx" / "target.onnx",
        cache=card.cache,
        vocab=card.vocab_size,
        eos_token_ids=frozenset(),
        kept=tmp_path / "answers.json",
        options=EngineOptions(threads=1, spin=False),
    )


def test_answers_follow_their_prompts_and_are_the_same_each_time(writer: Writer) -> None:
    prompts = [text[:5] for text in TEXTS[:3]]
    found = writer.answered(prompts)
    assert [text[:5] for text in found] == prompts
    assert {len(text) for text in found} == {5 + ANSWER_TOKENS}
    writer.kept.unlink()
    assert writer.answered(prompts) == found
    ends = replace(writer, eos_token_ids=frozenset([found[1][9]]), kept=writer.kept.parent / "e")
    assert ends.answered(prompts)[1][-1] == found[1][9]
    assert len(ends.answered(prompts)[1]) <= 10


def test_an_answer_that_is_kept_is_not_written_again(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [text[:5] for text in TEXTS[:3]]
    found = writer.answered(prompts)
    kept = json.loads(writer.kept.read_text())
    writer.kept.write_text(json.dumps(kept[:2]))
    written: list[int] = []
    true_answer = Writer._answer

    def answer(self: Writer, graph: CachedGraph, prompt: tuple[int, ...], seed: int):  # type: ignore[no-untyped-def]
        written.append(seed)
        return true_answer(self, graph, prompt, seed)

    monkeypatch.setattr(Writer, "_answer", answer)
    assert writer.answered(prompts) == found
    assert written == [2]


# Bundles


@pytest.fixture
def request_calibrated(
    kept_traces: None, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> BuildRequest:
    return BuildRequest(
        target=str(tiny_target),
        draft=str(tiny_draft),
        out=tmp_path / "bundle",
        precision="int4-gptq",
        max_draft_tokens=K,
        calibration=CalibrationRequest(cache=tmp_path / "cache"),
    )


def drift(bundle: Path) -> float:
    (gate,) = [g for g in Bundle.load(bundle).manifest.gates if g.name == "target parity"]
    return float(gate.figures["drift_kl"])


def test_a_calibrated_bundle_passes_its_gates_and_is_nearer(
    request_calibrated: BuildRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = Bundle.load(build(request_calibrated))
    assert bundle.manifest.target.precision == "int4-gptq"
    draft = bundle.manifest.draft
    assert draft is not None
    assert draft.precision == "int4"
    assert {g.status for g in bundle.manifest.gates} == {"passed"}
    report = json.loads((bundle.path / "reports" / "calibration.json").read_text())
    assert sum(map(len, report["texts"])) == report["tokens"]
    assert len(report["output_error"]) == 8
    solved, nearest = (
        sum(e[key] for e in report["output_error"].values()) for key in ("solved", "nearest")
    )
    assert solved < nearest

    monkeypatch.setattr(solving, "gptq", lambda weight, _hessian, fmt: quantize(weight, fmt))
    other = CalibrationRequest(cache=tmp_path / "other")
    rounded = build(replace(request_calibrated, out=tmp_path / "nearest", calibration=other))
    assert drift(bundle.path) < drift(rounded)


def test_scales_are_stored_in_half_precision(
    request_calibrated: BuildRequest, fp32_bundle: Path
) -> None:
    path = build(request_calibrated)
    errors = weight_errors(path, fp32_bundle)
    assert len(errors) == 2 * 4 + 2
    assert 0 < max(errors.values()) < 0.3
    assert max(error for name, error in errors.items() if "lm_head" in name) < 0.02
    graph = onnx.load(path / "onnx" / "target.onnx", load_external_data=False).graph
    scales = [t for t in graph.initializer if t.name.endswith(".scales")]
    assert {t.data_type for t in scales} == {onnx.TensorProto.FLOAT16}
    products = [n for n in graph.node if n.op_type == "MatMulNBits"]
    kinds = [(a.i, n.input[1]) for n in products for a in n.attribute if a.name == "bits"]
    assert {name for bits, name in kinds if bits == 8} == {"lm_head.weight.codes"}


def test_a_build_that_fails_later_does_not_calibrate_again(
    request_calibrated: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def fail(*_: object) -> None:
        raise BuildError("later")

    with monkeypatch.context() as patch:
        patch.setattr("export.build._gates", fail)
        with pytest.raises(BuildError, match="later"):
            build(request_calibrated, told.append)
    assert any("texts read" in line for line in told)
    told.clear()
    build(request_calibrated, told.append)
    assert not any("texts read" in line for line in told)


def test_too_little_text_is_refused(request_calibrated: BuildRequest, tmp_path: Path) -> None:
    prompts = tmp_path / "few.jsonl"
    prompts.write_text('{"prompt": "Hello."}\n')
    calibration = CalibrationRequest(prompt_files=(prompts,), cache=tmp_path / "cache")
    with pytest.raises(InvalidRequest, match=r"--calibration-prompts: received \d+ tokens"):
        build(replace(request_calibrated, calibration=calibration))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int4", "--calibration-prompts", "x"], "which reads no text"),
        (["--draft-precision", "int4-gptq"], "which calibrates a target"),
    ],
)
def test_misplaced_recipes_are_refused(
    tiny_target: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    asked = ["--target", str(tiny_target), "--draft", str(tiny_target)]
    done = CliRunner().invoke(app, ["build", *asked, "--out", str(tmp_path / "bundle"), *arguments])
    assert isinstance(done.exception, BuildError) or done.exit_code != 0
    assert message in str(done.exception) + done.stderr
