"""Pairs of bundles to compare: logit tables for exact figures, copies with planted faults."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from helpers_runtime import VOCAB, latency_report, near_table, target_table, write_bundle
from onnx import numpy_helper
from typer.testing import CliRunner

from calibration.cli import app
from calibration.comparison.model import Model
from calibration.comparison.open_graph import OpenGraph
from runtime.bundle import Bundle
from runtime.bundle_files import record_files
from runtime.manifest import Manifest

TARGET = target_table(VOCAB)
DRAFT = near_table(TARGET, 1.0)
NEAR_TARGET = near_table(TARGET, 0.3, seed=5)
NEAR_DRAFT = near_table(DRAFT, 0.5, seed=6)
FAST = ("--tokens", "24", "--temperatures", "0,1", "-k", "3", "--free-prompts", "1")


def write_tables(folder: Path) -> dict[str, Path]:
    """Two bundles that differ in target and draft."""
    slow, fast = latency_report(row=0.2, draft=0.1), latency_report(row=0.1, draft=0.05)
    return {
        "reference": write_bundle(folder / "reference", TARGET, DRAFT, latency=slow),
        "bundle": write_bundle(folder / "bundle", NEAR_TARGET, NEAR_DRAFT, latency=fast),
    }


def write_prompts(path: Path, count: int = 6) -> Path:
    rows = [{"prompt": f"text {i}", "category": "ab"[i % 2], "id": i} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_compare(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["compare", *map(str, arguments), "--json"])
    if done.exception:
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.strip().splitlines()[-1])


def failed_compare(*arguments: object) -> str:
    """stderr of a comparison that exits 1."""
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert done.exit_code == 1, done.output
    return done.stderr


def altered(bundle: Path, out: Path, change: Callable[[Path], None]) -> Path:
    """A copy with changed files and a manifest that vouches for them."""
    shutil.copytree(bundle, out)
    change(out)
    manifest = Manifest.from_json((out / "manifest.json").read_text())
    files = record_files(out)
    tokenizer = files["tokenizer.json"].sha256
    manifest = dataclasses.replace(manifest, files=files, tokenizer_sha256=tokenizer)
    (out / "manifest.json").write_text(manifest.to_json())
    return out


def changed_tensor(
    name: str, dtype: type, change: Callable[[np.ndarray], np.ndarray], graph: str
) -> Callable[[Path], None]:
    """Rewrite a tensor of a graph where it lies in the file, such as one layer's scales."""

    def apply(folder: Path) -> None:
        path = folder / "onnx" / f"{graph}.onnx"
        model = onnx.load(path, load_external_data=False)
        (tensor,) = [t for t in model.graph.initializer if t.name == name]
        if tensor.data_location != onnx.TensorProto.EXTERNAL:  # a small one
            array = change(numpy_helper.to_array(tensor)).astype(dtype)
            tensor.CopyFrom(numpy_helper.from_array(array, name))
            path.write_bytes(model.SerializeToString())
            return
        place = {e.key: e.value for e in tensor.external_data}
        data = np.memmap(path.parent / place["location"], mode="r+")
        part = data[int(place["offset"]) :][: int(place["length"])].view(dtype)
        part[:] = change(part)
        data.flush()

    return apply


def weight_errors(bundle: Path, reference: Path) -> dict[str, float]:
    """|w − w_reference| / |w_reference| of each layer of two targets."""
    ours, theirs = (OpenGraph(Model.target(Bundle.load(p))).weights for p in (bundle, reference))
    assert ours.keys() == theirs.keys()
    pairs = {name: (layer.read(), theirs[name].read()) for name, layer in ours.items()}
    return {n: float(np.linalg.norm(a - b) / np.linalg.norm(b)) for n, (a, b) in pairs.items()}
