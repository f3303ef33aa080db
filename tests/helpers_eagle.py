"""An EAGLE head and its target as table models (see helpers_runtime).

The target's feature of a row is the hash of all tokens up to it; the head adds its own token to the
hash, reads its table there and gives the new hash as its state. What it has in its cache turns the
logits a little, so that a wrong row there shows. Wrong features, or states of another row, make it
agree with the target by chance alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from helpers_runtime import named_caches, target_text, write_bundle
from numpy.typing import NDArray

from export.draft_tail import append_draft_sampling
from runtime.bundle_files import record_files
from runtime.manifest import EagleDraft, Manifest

_FEATURES = """
    sums_f = Cast <to = 1> (sums64)
    feature_axes = Constant <value_ints = [0, 2]> ()
    features = Unsqueeze (sums_f, feature_axes)
}
"""

_HEAD = """
<ir_version: 10, opset_import: ["" : 24]>
head (int64[batch, query_len] input_ids, float[batch, query_len, 1] states,
      int32[batch] past_lengths, float[batch, 1, {context}, 1] past_key,
      float[batch, 1, {context}, 1] past_value)
    => (float[batch, 1, {vocab}] logits, float[batch, 1, 1] next_state,
        float[batch, 1, {context}, 1] present_key, float[batch, 1, {context}, 1] present_value)
{{
    ids = Cast <to = 1> (input_ids)
    axes = Constant <value_ints = [1, 3]> ()
    rows = Unsqueeze (ids, axes)
    past64 = Cast <to = 7> (past_lengths)
    present_key = TensorScatter <axis = 2> (past_key, rows, past64)
    present_value = TensorScatter <axis = 2> (past_value, rows, past64)
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    two = Constant <value_int = 2> ()
    three = Constant <value_int = 3> ()
    eleven = Constant <value_int = 11> ()
    states_n = Constant <value_int = 61> ()
    scalar = Constant <value_ints = [1]> ()
    flat = Constant <value_ints = [-1]> ()
    last = Constant <value_ints = [-1]> ()
    id_shape = Shape (input_ids)
    query_len = Gather (id_shape, one)
    end = Add (past64, query_len)
    tripled = Mul (end, three)
    weight = Mod (tripled, eleven)
    weight1 = Add (weight, one)
    ids1 = Reshape (input_ids, flat)
    token = Gather (ids1, last)
    states1 = Reshape (states, flat)
    states64 = Cast <to = 7> (states1)
    state = Gather (states64, last)
    added = Mul (token, weight1)
    total = Add (state, added)
    token11 = Mul (token, eleven)
    index0 = Add (total, token11)
    index = Mod (index0, states_n)
    near = Gather (table, index)
    cache_shape = Shape (present_key)
    context = Gather (cache_shape, two)
    columns = Range (zero, context, one)
    seen = Less (columns, end)
    seen_f = Cast <to = 1> (seen)
    numbers = Add (columns, one)
    numbers_f = Cast <to = 1> (numbers)
    keys = Reshape (present_key, flat)
    weighted0 = Mul (keys, numbers_f)
    weighted = Mul (weighted0, seen_f)
    read_f = ReduceSum <keepdims = 0> (weighted)
    read = Cast <to = 7> (read_f)
    read_index0 = Mod (read, states_n)
    read_index = Reshape (read_index0, scalar)
    turn = Gather (turns, read_index)
    row = Add (near, turn)
    axis0 = Constant <value_ints = [0]> ()
    logits = Unsqueeze (row, axis0)
    total_f = Cast <to = 1> (total)
    state_axes = Constant <value_ints = [0, 2]> ()
    next_state = Unsqueeze (total_f, state_axes)
}}
"""

_FUSE = """
<ir_version: 10, opset_import: ["" : 24]>
fuse (float[batch, query_len, 1] features) => (float[batch, query_len, 1] states)
{ states = Identity (features) }
"""


def save_feature_target(path: Path, table: NDArray[Any], context: int) -> None:
    """A table model that also gives features, [batch, query_len, 1]."""
    text = target_text(table, context)
    text = text.replace(
        "] logits, float", "] logits, float[batch, query_len, 1] features, float", 1
    )
    text = text.rstrip().removesuffix("}") + _FEATURES
    onnx.save(named_caches(onnx.parser.parse_model(text), {"table": table}), path)


def save_head(
    path: Path,
    table: NDArray[Any],
    context: int,
    *,
    turn: float,
    d2t: NDArray[Any] | None = None,
    vocab: int | None = None,
) -> None:
    """The head, sampled by the exporter's own tail. turn: how far its cache turns the logits."""
    text = _HEAD.format(context=context, vocab=table.shape[1])
    rng = np.random.default_rng(9)
    turns = (rng.standard_normal(table.shape) * turn).astype(np.float32)
    model = named_caches(onnx.parser.parse_model(text), {"table": table, "turns": turns})
    wrapped = ir.serde.deserialize_model(model)
    append_draft_sampling(wrapped, d2t, vocab_size=vocab)
    ir.save(wrapped, path)


def save_fuse(path: Path) -> None:
    onnx.save(onnx.parser.parse_model(_FUSE), path)


def write_eagle_bundle(
    path: Path,
    table: NDArray[Any],
    head: NDArray[Any],
    *,
    context: int = 96,
    turn: float = 0.3,
    d2t: NDArray[Any] | None = None,
    version: int = 3,
    **options: Any,
) -> Path:
    """As helpers_runtime.write_bundle, with `head` as the table of an EAGLE head."""
    write_bundle(path, table, head, context=context, d2t=d2t, **options)
    onnx_dir = path / "onnx"
    save_feature_target(onnx_dir / "target.onnx", table, context)
    save_head(onnx_dir / "draft.onnx", head, context, turn=turn, d2t=d2t, vocab=table.shape[1])
    if version == 3:
        save_fuse(onnx_dir / "fuse.onnx")
    made = Manifest.from_json((path / "manifest.json").read_text())
    assert made.draft_model is not None
    card = EagleDraft(
        version=version, card=made.draft_model, taps=(1,), feature_width=1, state_width=1
    )
    (path / "manifest.json").unlink()
    made = replace(made, draft=card, files=record_files(path))
    (path / "manifest.json").write_text(made.to_json())
    return path
