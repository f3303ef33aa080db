"""Planted faults are found, and the report says where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_calibration import (
    DRAFT,
    TARGET,
    altered,
    changed_tensor,
    failed_compare,
    run_compare,
    write_prompts,
)
from helpers_runtime import VOCAB, write_bundle

from calibration.comparison.model import Model
from calibration.comparison.open_graph import OpenGraph
from calibration.comparison.opened import OpenBundle
from runtime.bundle import Bundle
from runtime.executor import EngineOptions

QUICK = ("--tokens", "12", "--temperatures", "0,1", "-k", "2", "--free-prompts", "0")
KNOWN = np.arange(0, VOCAB - 20, 2)  # target ids of a draft that knows every other token
LAYER = "model.layers.1.mlp.down_proj.weight.scales"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Path:
    return write_prompts(folder / "prompts.jsonl", count=4)


def compared(folder: Path, bundle: Path, reference: Path, prompts: Path) -> dict[str, Any]:
    return run_compare(
        bundle, "--reference", reference, "--prompts", prompts, *QUICK, "--layer-tokens", "24",
        "--out", folder / f"{bundle.name}-{reference.name}",
    )  # fmt: skip


def test_int4_against_fp32_moves_every_layer_a_little(
    folder: Path, fp32_bundle: Path, int4_bundle: Path, prompts: Path
) -> None:
    result = compared(folder, int4_bundle, fp32_bundle, prompts)
    layers = result["layers"]["layers"]
    assert len(layers) == 2 * 4 + 2  # of each: qkv, o, gate and up, down; embedding and head
    assert all(layer["kl"] > 0 and layer["weight_error"] < 0.2 for layer in layers)
    assert not [text for text in result["findings"] if " layer " in text]
    drafts = result["draft_layers"]["layers"]
    assert len(drafts) == 4 + 2
    assert all(layer["kl"] > 0 and layer["weight_error"] < 0.2 for layer in drafts)


def test_int4_against_itself_moves_no_layer(folder: Path, int4_bundle: Path, prompts: Path) -> None:
    result = compared(folder, int4_bundle, int4_bundle, prompts)
    assert len(result["layers"]["layers"]) == 10
    layers = [*result["layers"]["layers"], *result["draft_layers"]["layers"]]
    assert all(layer["kl"] == 0 == layer["weight_error"] for layer in layers)
    assert {cell["drift"]["kl"]["value"] for cell in result["cells"]} == {0.0}
    assert {cell["differences"]["both"]["value"] for cell in result["cells"]} == {0.0}
    assert result["findings"] == []


@pytest.mark.parametrize("model", ["target", "draft"])
def test_one_layer_s_scales_times_4_are_named(
    folder: Path, fp32_bundle: Path, int4_bundle: Path, prompts: Path, model: str
) -> None:
    layer = {"target": "layers.1.mlp.down_proj", "draft": "layers.0.self_attn.o_proj"}[model]
    scales = f"model.{layer}.weight.scales"
    fault = changed_tensor(scales, np.float32, lambda scales: scales * 4, model)
    broken = altered(int4_bundle, folder / f"scaled-{model}", fault)
    result = compared(folder, broken, fp32_bundle, prompts)
    layers = result[{"target": "layers", "draft": "draft_layers"}[model]]["layers"]
    worst = max(layers, key=lambda layer: layer["kl"])
    assert worst["name"] == layer
    assert worst["weight_error"] == pytest.approx(3, abs=0.3)
    named = [text for text in result["findings"] if " layer " in text]
    assert [text.split(":")[0] for text in named] == [f"{model} layer {layer}"]


def test_weights_that_are_not_finite_name_their_layer(
    folder: Path, fp32_bundle: Path, int4_bundle: Path, prompts: Path
) -> None:
    fault = changed_tensor(LAYER, np.float32, lambda scales: scales * np.nan, "target")
    broken = altered(int4_bundle, folder / "nan", fault)
    error = failed_compare(
        broken, "--reference", fp32_bundle, "--prompts", prompts, *QUICK, "--out", folder / "none"
    )
    assert "nan: target: received logits that are not finite" in error
    assert "Weights that are not finite: layers.1.mlp.down_proj." in error


def test_a_head_in_two_bits_is_named(
    folder: Path, fp32_bundle: Path, int4_bundle: Path, prompts: Path
) -> None:
    """Codes lose their two lower bits, in both nibbles; the tied embedding shares the bytes."""
    name = next(
        n for n in OpenGraph(Model.target(Bundle.load(int4_bundle))).weights if "lookup" in n
    )
    codes = name.removesuffix(" (lookup)") + ".codes"
    fault = changed_tensor(codes, np.uint8, lambda both: (both & 0b11001100) | 0b00100010, "target")
    broken = altered(int4_bundle, folder / "head", fault)
    result = compared(folder, broken, fp32_bundle, prompts)
    ranked = sorted(result["layers"]["layers"], key=lambda layer: -layer["kl"])
    assert {layer["group"] for layer in ranked[:2]} == {"other"}


@pytest.fixture(scope="module")
def trimmed(folder: Path) -> Path:
    return write_trimmed(folder / "trimmed", KNOWN)


def write_trimmed(path: Path, ids: np.ndarray) -> Path:
    """A draft that knows `KNOWN`, and says that it means `ids`."""
    return write_bundle(path, TARGET, DRAFT[:, KNOWN], d2t=ids - np.arange(len(ids)))


def test_a_shifted_draft_map_is_found(folder: Path, trimmed: Path, prompts: Path) -> None:
    shifted = write_trimmed(folder / "shifted", KNOWN + 1)
    result = compared(folder, shifted, trimmed, prompts)
    assert result["findings"][0].startswith(f"d2t: {len(KNOWN)} of {len(KNOWN)} entries")
    assert "first entry 0: target id 1, the reference says 0" in result["findings"][0]
    assert "most of it comes from the draft" in result["findings"][1]


def test_a_map_that_is_not_the_graph_s_own_is_found(
    folder: Path, trimmed: Path, prompts: Path
) -> None:
    def change(path: Path) -> None:
        np.save(path / "d2t.npy", KNOWN + 1 - np.arange(len(KNOWN)))

    odd = altered(trimmed, folder / "odd", change)
    result = compared(folder, odd, trimmed, prompts)
    (said,) = [text for text in result["findings"] if "d2t.npy map to different" in text]
    assert "the bundle's draft proposed" in said


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_the_opened_graph_computes_what_the_bundle_s_does(
    request: pytest.FixtureRequest, precision: str
) -> None:
    """f32: rounding alone. int4: the engine rounds activations to int8, too; this doesn't."""
    bundle = Bundle.load(request.getfixturevalue(f"{precision}_bundle"))
    tokens = list(range(60, 92))
    opened = OpenGraph(Model.target(bundle))
    weights = {name: layer.read() for name, layer in opened.weights.items()}
    found = np.zeros((1, len(tokens), opened.model.vocab), np.float32)
    values = {
        "input_ids": np.array([tokens], np.int64),
        "num_logits": np.array(len(tokens), np.int64),
    }
    opened.opened(EngineOptions(threads=1)).run(weights, values, {"logits": found})
    expected = OpenBundle(bundle, EngineOptions(threads=1)).target().rows(tokens)
    error = np.linalg.norm(found[0] - expected) / np.linalg.norm(expected - expected.mean())
    assert error < {"fp32": 1e-5, "int4": 0.1}[precision]


@pytest.mark.slow
def test_a_checkpoint_is_built_to_a_reference_once(
    folder: Path, fp32_bundle: Path, tiny_target: Path, tiny_draft: Path, prompts: Path
) -> None:
    arguments = (
        fp32_bundle, "--reference", tiny_target, "--reference-draft", tiny_draft,
        "--prompts", prompts, *QUICK, "--cache", folder / "cache", "--out", folder / "built",
    )  # fmt: skip
    results = [run_compare(*arguments) for _ in range(2)]
    (built,) = (folder / "cache").iterdir()
    assert results[0]["sides"]["reference"]["name"] == built.name
    assert {cell["drift"]["kl"]["value"] for cell in results[0]["cells"]} == {0.0}
    assert results[0]["cells"] == results[1]["cells"]


@pytest.mark.slow
def test_a_checkpoint_that_does_not_build_says_why(
    folder: Path, fp32_bundle: Path, tiny_draft: Path, prompts: Path
) -> None:
    error = failed_compare(
        fp32_bundle, "--reference", folder / "nowhere", "--reference-draft", tiny_draft,
        "--prompts", prompts, *QUICK, "--cache", folder / "cache", "--out", folder / "built",
    )  # fmt: skip
    (line,) = [line for line in error.splitlines() if line.startswith("error:")]
    assert "its build failed: error:" in line
