"""Find rotary position embedding in a traced graph and tabulate its angles.

Transformers applies RoPE before attention, as `x * cos + rotate(x) * sin`. ONNX Runtime's
attention can do it inside, from tables over positions. The tables are not rebuilt from the
configuration: the graph's own cos and sin are run for every position, so any rope scaling that
the model's code computes (linear, llama3, yarn) is carried as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from ..matching import operands, producer, slice_of


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """`x` before RoPE, and the traced angles [batch, 1, position, rotary_dim] that turn it."""

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    rotary_dim: int
    interleaved: bool


def match_rotary(value: ir.Value) -> Rotary | None:
    """RoPE that made `value` [batch, heads, query_len, head_dim], whole or on its first part."""
    whole = _match_turn(value)
    if whole is not None:
        return whole
    concat = producer(value, "Concat")
    if concat is None or len(concat.inputs) != 2 or not _last_axis(concat):
        return None
    turned, passed = concat.inputs
    part = _match_turn(turned)
    if part is None or passed is None:
        return None
    rest = slice_of(passed)
    first = slice_of(part.x)
    if rest is None or first is None or rest[0] is not first[0] or first[1] != 0:
        return None
    if first[2] != rest[1] or first[2] != part.rotary_dim:
        return None
    return Rotary(
        x=first[0], cos=part.cos, sin=part.sin, rotary_dim=part.rotary_dim,
        interleaved=part.interleaved,
    )  # fmt: skip


def _match_turn(value: ir.Value | None) -> Rotary | None:
    """`x * cos + rotate(x) * sin`."""
    add = producer(value, "Add")
    if add is None:
        return None
    for plain, turned in operands(add):
        left, right = producer(plain, "Mul"), producer(turned, "Mul")
        if left is None or right is None:
            continue
        for x, cos in operands(left):
            for rotated, sin in operands(right):
                kind = _match_rotation(rotated, x)
                if kind is not None:
                    dim = _rotary_dim(cos)
                    if dim is not None:
                        return Rotary(x=x, cos=cos, sin=sin, rotary_dim=dim, interleaved=kind == 2)
    return None


def _rotary_dim(cos: ir.Value) -> int | None:
    if cos.shape is None or not len(cos.shape):
        return None
    size = cos.shape[-1]
    return size if isinstance(size, int) else None


def _match_rotation(rotated: ir.Value, x: ir.Value) -> int | None:
    """1: halves swapped (Llama); 2: neighbours swapped (GPT-J style)."""
    concat = producer(rotated, "Concat")
    if concat is not None and len(concat.inputs) == 2 and _last_axis(concat):
        negated = producer(concat.inputs[0], "Neg")
        if negated is not None:
            high, low = slice_of(negated.inputs[0]), slice_of(concat.inputs[1])
            if high and low and high[0] is x and low[0] is x and high[3] == low[3] == 1:
                return 1 if low[1] == 0 and low[2] == high[1] else None
    reshape = producer(rotated, "Reshape")
    concat = producer(reshape.inputs[0], "Concat") if reshape is not None else None
    if concat is None or len(concat.inputs) != 2 or not _last_axis(concat):
        return None
    odd, even = producer(concat.inputs[0], "Unsqueeze"), producer(concat.inputs[1], "Unsqueeze")
    if odd is None or even is None:
        return None
    negated = producer(odd.inputs[0], "Neg")
    high = slice_of(negated.inputs[0]) if negated is not None else None
    low = slice_of(even.inputs[0])
    if high and low and high[0] is x and low[0] is x and high[3] == low[3] == 2:
        return 2 if (low[1], high[1]) == (0, 1) else None
    return None


def _last_axis(node: ir.Node) -> bool:
    axis = node.attributes["axis"].as_int()
    shape = node.outputs[0].shape
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def tabulate(model: ir.Model, rotary: Rotary, max_context: int) -> tuple[np.ndarray, np.ndarray]:
    """The graph's own angles at positions 0 … max_context - 1.

    Returns cos and sin, [max_context, rotary_dim / 2] f32, one column a turned pair.
    Raises ValueError where the two halves of a pair are turned by different angles.
    """
    inputs = {v.name: v for v in model.graph.inputs}
    names = [n for n in ("input_ids", "past_lengths", "depths", "visible") if n in inputs]
    graph = ir.convenience.extract(
        model.graph, [inputs[n] for n in names], [rotary.cos, rotary.sin]
    )
    proto = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {
        "input_ids": np.zeros((1, max_context), np.int64),
        "past_lengths": np.zeros(1, np.int32),
        "depths": np.arange(max_context)[None],
        "visible": np.zeros((1, max_context, max_context), np.bool_),  # at most its shape is read
    }
    wanted = {i.name for i in session.get_inputs()}
    cos, sin = session.run(None, {k: v for k, v in feed.items() if k in wanted})
    return _one_a_pair(cos, rotary), _one_a_pair(sin, rotary)


def _one_a_pair(angles: np.ndarray, rotary: Rotary) -> np.ndarray:
    table = angles.reshape(-1, rotary.rotary_dim)
    half = rotary.rotary_dim // 2
    pairs = (table[:, 0::2], table[:, 1::2]) if rotary.interleaved else (
        table[:, :half], table[:, half:]
    )  # fmt: skip
    if not np.array_equal(*pairs):
        raise ValueError("the two halves of a rotary pair have different angles")
    return np.ascontiguousarray(pairs[0], dtype=np.float32)
