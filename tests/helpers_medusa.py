"""Medusa heads as table models (see helpers_runtime and helpers_eagle): one table a head.

Each head reads its table at the hash of all tokens up to the target's last row.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from helpers_eagle import save_feature_target
from helpers_runtime import STATES, write_bundle
from numpy.typing import NDArray
from onnx import numpy_helper

from export.draft_tail import tail_model
from runtime.bundle_files import record_files
from runtime.manifest import Manifest, MedusaDraft

_HEADS = """
<ir_version: 10, opset_import: ["" : 24]>
heads (float[batch, query_len, 1] features) => (float[batch, {heads}, {vocab}] head_logits)
{{
    flat = Constant <value_ints = [-1]> ()
    last = Constant <value_ints = [-1]> ()
    states = Constant <value_int = 61> ()
    rows = Reshape (features, flat)
    row = Gather (rows, last)
    row64 = Cast <to = 7> (row)
    index = Mod (row64, states)
    head_logits = Gather (tables, index)
}}
"""


def write_medusa_bundle(
    path: Path,
    table: NDArray[Any],
    tables: NDArray[Any],  # [STATES, heads, D]
    *,
    context: int = 96,
    d2t: NDArray[Any] | None = None,
    **options: Any,
) -> Path:
    """As helpers_runtime.write_bundle, with `tables` as those of the heads."""
    assert len(tables) == STATES
    _, heads, vocab = tables.shape
    write_bundle(path, table, tables[:, 0], context=context, d2t=d2t, **options)
    (path / "onnx" / "draft.onnx").unlink()
    save_feature_target(path / "onnx" / "target.onnx", table, context)
    model = onnx.parser.parse_model(_HEADS.format(heads=heads, vocab=vocab))
    model.graph.initializer.append(numpy_helper.from_array(tables, "tables"))
    onnx.save(model, path / "onnx" / "heads.onnx")
    ir.save(tail_model(vocab, d2t, vocab_size=table.shape[1]), path / "onnx" / "tail.onnx")
    made = Manifest.from_json((path / "manifest.json").read_text())
    card = MedusaDraft(
        name="heads",
        revision="",
        sha256="0" * 64,
        parameters=int(np.prod(tables.shape)),
        precision="fp32",
        num_heads=heads,
        vocab_size=vocab,
        feature_width=1,
    )
    (path / "manifest.json").unlink()
    made = replace(made, draft=card, files=record_files(path))
    (path / "manifest.json").write_text(made.to_json())
    return path
