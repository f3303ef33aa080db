"""Codes that spare what large inputs meet: factors, where they go, and the way to a bundle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from family_configs import FAMILIES
from helpers_build import K
from helpers_calibration import altered, changed_tensor
from tiny_checkpoints import save

from calibration import solve as solving
from calibration.awq import cut, factors, output_error
from calibration.block_quantization import BlockFormat, dequantize, quantize, signed_codes
from calibration.collect import Calibration
from calibration.comparison.law import log_law
from calibration.comparison.layers import target_layers
from calibration.factors import Factors
from calibration.folds import Fold, find_folds
from calibration.sites import ReferenceGraph
from calibration.solve import solve_scaled
from calibration.solved import SolvedWeights
from engines.external_data import WeightStore
from export.build import BuildRequest, build
from export.calibrated import CalibrationRequest
from export.checkpoint import Checkpoint, open_checkpoint
from export.gate_graph import GateGraph
from export.gates import relative_error
from export.graphs import write_target
from export.precision import PRECISIONS
from runtime.bundle import Bundle
from runtime.errors import BuildError, EngineError
from runtime.executor import EngineOptions

RNG = np.random.default_rng(0)
FMT = BlockFormat(bits=4, block=32, symmetric=True, half_scales=True)
FEATURES = 96


def weight_and_hessian(far: float) -> tuple[np.ndarray, np.ndarray]:
    """Every eighth input is `far` times as large as the others."""
    size = np.where(np.arange(FEATURES) % 8 == 3, far, 1.0)
    x = (RNG.standard_normal((400, FEATURES)) * size).astype(np.float32)
    return RNG.standard_normal((40, FEATURES)).astype(np.float32), x.T @ x


# Factors


def scaled_error(weight: np.ndarray, hessian: np.ndarray, s: np.ndarray) -> float:
    rounded = dequantize(quantize(weight * s, FMT), FMT, FEATURES) / s
    return output_error(weight, rounded, hessian)


def test_large_inputs_meet_fine_weights() -> None:
    """Less than half of the error that the nearest codes make; 0.26 was seen."""
    weight, hessian = weight_and_hessian(20)
    s = factors([weight], hessian, Fold(), FMT)
    assert s[3] > 2 * s[4]
    nearest = scaled_error(weight, hessian, np.ones(FEATURES, np.float32))
    assert scaled_error(weight, hessian, s) < 0.5 * nearest


def test_equal_inputs_need_no_factors() -> None:
    weight, hessian = weight_and_hessian(1)
    s = factors([weight], hessian, Fold(), FMT)
    ones = np.ones(FEATURES, np.float32)
    assert scaled_error(weight, hessian, s) <= scaled_error(weight, hessian, ones)


def test_inputs_that_are_always_0_have_a_factor_of_1() -> None:
    weight, hessian = weight_and_hessian(20)
    hessian[5], hessian[:, 5] = 0, 0
    s = factors([weight], hessian, Fold(), FMT)
    assert s[5] == 1
    np.testing.assert_array_equal(factors([weight], 0 * hessian, Fold(), FMT), 1)


def test_query_heads_share_the_factors_of_their_values() -> None:
    fold = Fold(layer="v", heads=2, readers=3)
    x = RNG.random(24)
    shared = fold.shared(x)
    assert shared.shape == (8,)
    np.testing.assert_allclose(shared[:4], (x[:4] + x[4:8] + x[8:12]) / 3)
    spread = fold.spread(shared)
    np.testing.assert_array_equal(spread[:4], spread[8:12])
    np.testing.assert_allclose(fold.shared(spread), shared)


def test_blocks_are_cut_off_where_that_serves_the_output() -> None:
    """One weight of each block is large, and its input hardly ever anything: less than half."""
    weight, _ = weight_and_hessian(1)
    weight[:, ::32] *= 8
    x = RNG.standard_normal((400, FEATURES)).astype(np.float32)
    x[:, ::32] *= 0.01
    hessian = x.T @ x
    errors = [
        output_error(weight, dequantize(made, FMT, FEATURES), hessian)
        for made in (cut(weight, hessian, FMT), quantize(weight, FMT))
    ]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("far", [1, 20])
def test_cutting_off_is_never_worse(far: float) -> None:
    weight, hessian = weight_and_hessian(far)
    made = dequantize(cut(weight, hessian, FMT), FMT, FEATURES)
    nearest = dequantize(quantize(weight, FMT), FMT, FEATURES)
    assert output_error(weight, made, hessian) <= output_error(weight, nearest, hessian)


def test_even_codes_reach_as_far_down_as_up() -> None:
    fmt = replace(FMT, even=True)
    weight, _ = weight_and_hessian(1)
    made = quantize(weight, fmt)
    codes = signed_codes(made, fmt)
    assert (codes.min(), codes.max()) == (-7, 7)
    assert (made.scales > 0).all()
    values = codes.reshape(40, -1, 32) * made.scales[..., None]
    np.testing.assert_array_equal(values.reshape(40, -1), dequantize(made, fmt, FEATURES))


# Where they go


def written_logits(checkpoint: Checkpoint, folder: Path, solved: SolvedWeights | None):  # type: ignore[no-untyped-def]
    folder.mkdir()
    precision = replace(PRECISIONS["fp32"], solved=solved)
    written = write_target(checkpoint, precision, 48, WeightStore(directory=folder))
    graph = GateGraph(folder / "target.onnx", written.cache, written.vocab_size)
    return graph.in_chunks([(7 * i + 3) % 90 for i in range(24)])


# Of each layer: what may be divided for q, k and v; o; gate and up; down.
EXPECTED = {
    "llama": {"vectors": 4, "rows": 0},  # rows have biases in this configuration
    "mistral": {"vectors": 4, "rows": 4},
    "qwen3": {"vectors": 4, "rows": 4},
    "gemma2": {"vectors": 0, "rows": 4},  # norms multiply by 1 + weight
    "gpt2": {"vectors": 8, "rows": 0},  # norms with a bias; no gate; values have a bias
}


@pytest.mark.parametrize("name", EXPECTED)
def test_moved_factors_change_nothing(name: str, tmp_path: Path) -> None:
    """Random factors in f32: the same logits, from weights that are others."""
    config = next(f for f in FAMILIES if f.name == name).config()
    save(tmp_path / "model", config)
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    plain = written_logits(checkpoint, tmp_path / "plain", None)
    graph = ReferenceGraph(tmp_path / "plain" / "target.onnx")
    folds = find_folds(graph, lambda n: checkpoint.find(n) is not None)
    sites = [site for site in graph.sites if not site.is_head]
    random = {
        value: fold.spread(np.exp(RNG.standard_normal(_width(fold, sites, value))))
        for value, fold in folds.items()
    }
    moved = Factors(path=tmp_path / "factors.npz")
    moved.features.update(
        {s.weight: random[s.reads].astype(np.float32) for s in sites if s.reads in random}
    )
    moved.put(folds, {s.weight: s.reads for s in sites}, {s.weight: s.rows for s in sites})
    assert len(moved.vectors) == EXPECTED[name]["vectors"]
    assert len([f for f in folds.values() if f.layer]) == EXPECTED[name]["rows"]
    solved = SolvedWeights(
        directory=tmp_path,
        format=FMT,
        rows_of=lambda n: _rows(checkpoint, n),
        names={s.weight for s in sites},
        factors=moved,
    )
    found = written_logits(checkpoint, tmp_path / "moved", solved)
    assert relative_error(found, plain) < 1e-5
    recalled = Factors(path=moved.path)
    recalled.recall()
    assert recalled.rows.keys() == moved.rows.keys()
    moved.features.clear()  # a fault: what was divided isn't multiplied
    assert relative_error(written_logits(checkpoint, tmp_path / "fault", solved), plain) > 0.05


def _width(fold: Fold, sites: list, value: str) -> int:  # type: ignore[type-arg]
    return next(s.features for s in sites if s.reads == value) // fold.readers


def _rows(checkpoint: Checkpoint, name: str) -> int:
    shape = checkpoint.shape(checkpoint.find(name.removesuffix(".T")) or name)
    return shape[1] if name.endswith(".T") else shape[0]


# Bundles


@pytest.fixture
def asked(kept_traces: None, tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> BuildRequest:
    return BuildRequest(
        target=str(tiny_target),
        draft=str(tiny_draft),
        out=tmp_path / "bundle",
        precision="int4-awq",
        max_draft_tokens=K,
        calibration=CalibrationRequest(cache=tmp_path / "cache"),
    )


def test_a_bundle_passes_its_gates_and_layers_are_nearer(asked: BuildRequest) -> None:
    """Parity is with the eager model as it was saved: factors go again where they came from."""
    bundle = Bundle.load(build(asked))
    gates = {gate.name: gate for gate in bundle.manifest.gates}
    assert {gate.status for gate in gates.values()} == {"passed"}
    assert float(gates["target parity"].figures["relative_error"]) < 1e-4
    errors = json.loads((bundle.path / "reports" / "calibration.json").read_text())["output_error"]
    assert len(errors) == 2 * 4
    assert all(one["solved"] < 1.001 * one["nearest"] for one in errors.values())
    assert sum(e["solved"] for e in errors.values()) < sum(e["nearest"] for e in errors.values())


def test_what_a_decoder_layer_costs_is_measured_with_its_factors(
    asked: BuildRequest, fp32_bundle: Path, tmp_path: Path
) -> None:
    """A weight that is scaled for its neighbours means nothing without them; a layer does, and what
    the layers cost adds up to what all of them cost together."""
    path, options = build(asked), EngineOptions(threads=1, spin=False)
    tokens = [(7 * i) % 250 for i in range(24)]

    def costs(bundle: Path, reference: Path = fp32_bundle) -> dict[str, float]:
        sides = Bundle.load(reference), Bundle.load(bundle)
        return {one.name: one.kl for one in target_layers(*sides, tokens, options).layers}

    found = costs(path)
    assert list(found) == ["lm_head (lookup)", "layers.0", "layers.1", "lm_head"]
    theirs, ours = (_law(bundle, tokens) for bundle in (fp32_bundle, path))
    drift = float((np.exp(theirs) * (theirs - ours)).sum(-1).mean())
    assert sum(found.values()) == pytest.approx(drift, rel=0.1)
    assert set(costs(path, path).values()) == {0.0}

    # Without its part of the factors the layer computes something else.
    norm = "model.layers.1.post_attention_layernorm.weight"
    fault = changed_tensor(norm, np.float32, np.ones_like, "target")
    broken = costs(altered(path, tmp_path / "broken", fault))
    assert broken["layers.1"] > 1.05 * found["layers.1"]
    assert broken["layers.0"] == found["layers.0"]


def _law(path: Path, tokens: list[int]) -> np.ndarray:
    """log p [tokens, vocab] of a bundle's target."""
    bundle = Bundle.load(path)
    card = bundle.manifest.target
    graph = GateGraph(bundle.model_path("target"), card.cache, card.vocab_size)
    return log_law(graph.in_chunks(tokens))


def test_an_interrupted_calibration_goes_on(
    asked: BuildRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After three of eight layers; nothing is written or solved twice, and the result is equal."""
    straight = build(replace(asked, calibration=CalibrationRequest(cache=tmp_path / "other")))
    solved: list[int] = []
    true_cut = solving.cut

    def stopping(*arguments):  # type: ignore[no-untyped-def]
        if len(solved) == 3:
            raise KeyboardInterrupt
        solved.append(1)
        return true_cut(*arguments)

    again = replace(asked, out=tmp_path / "again")
    with monkeypatch.context() as patch:
        patch.setattr(solving, "cut", stopping)
        with pytest.raises(KeyboardInterrupt):
            build(again)
    more: list[int] = []

    def counting(*arguments):  # type: ignore[no-untyped-def]
        more.append(1)
        return true_cut(*arguments)

    monkeypatch.setattr(solving, "cut", counting)
    told: list[str] = []
    build(again, told.append)
    assert len(more) == 5
    assert not any("texts written" in line for line in told)
    for name in ("target.data", "target.onnx"):
        left, right = ((path / "onnx" / name).read_bytes() for path in (straight, again.out))
        assert left == right
    again_built = build(replace(asked, out=tmp_path / "third"), told.append)
    assert any("calibrated before" in line for line in told)
    third = (again_built / "onnx" / "target.data").read_bytes()
    assert third == (straight / "onnx" / "target.data").read_bytes()


def test_activations_that_are_not_finite_name_the_layer(fp32_bundle: Path, tmp_path: Path) -> None:
    import shutil

    copied = shutil.copytree(fp32_bundle, tmp_path / "copy")
    name = "model.layers.1.mlp.down_proj.weight.T"
    changed_tensor(name, np.float32, lambda a: a * np.float32("inf"), "target")(copied)
    card = Bundle.load(fp32_bundle).manifest.target
    run = Calibration(
        cache=card.cache,
        vocab=card.vocab_size,
        texts=[[(7 * i + j) % 250 for j in range(20)] for i in range(3)],
        work=tmp_path,
        options=EngineOptions(threads=1, spin=False),
    )
    solved = SolvedWeights(
        directory=tmp_path / "solved",
        format=FMT,
        rows_of=lambda _: 0,
        factors=Factors(path=tmp_path / "factors.npz"),
    )
    with pytest.raises(EngineError, match=r"1\.mlp\.down_proj.*not finite"):
        solve_scaled(ReferenceGraph(copied / "onnx" / "target.onnx"), run, solved, lambda _: True)


def test_a_draft_is_not_calibrated(asked: BuildRequest) -> None:
    with pytest.raises(BuildError, match=r"--draft-precision: received 'int4-awq', which cal"):
        build(replace(asked, draft_precision="int4-awq"))
