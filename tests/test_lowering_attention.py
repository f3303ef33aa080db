"""Static-cache attention → GroupQueryAttention: the same numbers, RoPE, windows and soft caps."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from helpers_attention import CONTEXT, attention_graph, slice_text
from helpers_lowering import Array, graph_of, operators, random, run

from engines.onnxruntime.attention import GroupQueryAttentionPass
from engines.onnxruntime.lowering import lower
from engines.onnxruntime.rotary import match_rotary, tabulate
from runtime.errors import BuildError


def test_attention_without_a_cache_is_named() -> None:
    model = graph_of(
        """g (float[1,2,s,16] q, float[1,2,s,16] k, float[1,2,s,16] v) => (float[1,2,s,16] y)
        { y = Attention(q, k, v) }""",
        {},
    )
    with pytest.raises(BuildError, match=r"GroupQueryAttentionPass.*without a static cache"):
        lower(model, None)


def _attention_feed(size: int, past: int, rows: int) -> dict[str, Array]:
    return {
        "input_ids": np.zeros((1, rows), np.int64),
        "past_lengths": np.array([past], np.int32),
        "qf": 2 * random(1, rows, 2 * size),
        "kf": 2 * random(1, rows, size, seed=1),
        "vf": random(1, rows, size, seed=2),
        "pk": 2 * random(1, 1, CONTEXT, size, seed=3),
        "pv": random(1, 1, CONTEXT, size, seed=4),
    }


def _compare_attention(model: ir.Model, size: int) -> None:
    feeds = [_attention_feed(size, past, rows) for past, rows in ((0, 9), (9, 1), (11, 5))]
    before = [run(model, feed) for feed in feeds]
    assert GroupQueryAttentionPass()(model).modified
    for feed, (y, keys, values) in zip(feeds, before, strict=True):
        new_y, new_keys, new_values = run(model, feed)
        length = int(feed["past_lengths"][0]) + feed["input_ids"].shape[1]
        np.testing.assert_allclose(new_y, y, atol=2e-5)
        np.testing.assert_allclose(new_keys[:, :, :length], keys[:, :, :length], atol=1e-5)
        np.testing.assert_allclose(new_values[:, :, :length], values[:, :, :length], atol=0)


@pytest.mark.parametrize(
    ("size", "rotary", "interleaved", "inside"),
    [
        (16, 16, False, 1),
        (32, 16, False, 1),
        (32, 32, True, 1),
        (32, 16, True, 1),
        (32, 8, False, 0),  # fewer features than the operator turns
        (24, 24, False, 0),  # heads that it takes, but not with RoPE
        (16, 0, False, 0),
    ],
)
def test_attention_with_rope(size: int, rotary: int, interleaved: bool, inside: int) -> None:
    model = attention_graph(size, rotary, interleaved, window=0, softcap=0.0)
    _compare_attention(model, size)
    node = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    assert node.attributes["do_rotary"].as_int() == inside
    assert operators(model)["Neg"] == (0 if inside else 2 if rotary else 0)


@pytest.mark.parametrize("window", [0, 1, 2, 7, 8, 9])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention_with_window_and_soft_cap(window: int, softcap: float) -> None:
    """Both count a window with the query's own row in it: no row more, no row less."""
    _compare_attention(attention_graph(16, 16, False, window, softcap), 16)


def test_heads_that_do_not_fit_keep_the_standard_operators() -> None:
    model = attention_graph(12, 12, False, window=0, softcap=0.0)
    assert not GroupQueryAttentionPass()(model).modified
    assert operators(model)["Attention"] == 1


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_tables_are_the_graphs_own_angles(interleaved: bool) -> None:
    model = attention_graph(32, 16, interleaved, window=0, softcap=0.0)
    scatter = next(n for n in model.graph if n.op_type == "TensorScatter")
    rotary = match_rotary(scatter.inputs[1])
    assert rotary is not None
    assert (rotary.rotary_dim, rotary.interleaved) == (16, interleaved)
    cos, sin = tabulate(model, rotary, CONTEXT)
    angles = np.arange(CONTEXT)[:, None] * 0.7 ** np.arange(8)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-5)


def test_adjacent_slices_of_one_projection_go_in_packed() -> None:
    model = attention_graph(16, 16, False, window=0, softcap=0.0)
    text = (
        """g (float[1,n,64] qkv) => (float[1,n,32] qf, float[1,n,16] kf, float[1,n,16] vf) { %s }"""
    )
    cuts = [("qf", 0, 32), ("kf", 32, 48), ("vf", 48, 64)]
    parts = graph_of(
        text % "".join(slice_text(n, "qkv", a, b, 1).replace("[3]", "[2]") for n, a, b in cuts), {}
    )
    _put_before(model, parts)
    feed = _attention_feed(16, 9, 3)
    feed["qkv"] = np.concatenate([feed.pop(n) for n, *_ in cuts], -1)
    expected = run(model, feed)
    GroupQueryAttentionPass()(model)
    node = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    assert node.inputs[1] is None
    assert operators(model)["Slice"] == 0
    np.testing.assert_allclose(run(model, feed)[0], expected[0], atol=2e-5)


def _put_before(model: ir.Model, parts: ir.Model) -> None:
    """Feed the inputs of `model` that `parts` makes from `parts`, whose inputs it takes over."""
    outputs = {v.name: v for v in parts.graph.outputs}
    inputs = list(parts.graph.inputs)
    nodes = list(parts.graph)
    parts.graph.outputs.clear()
    parts.graph.inputs.clear()
    parts.graph.remove(nodes)
    model.graph.insert_before(model.graph[0], nodes)
    for value in [v for v in model.graph.inputs if v.name in outputs]:
        value.replace_all_uses_with(outputs[value.name])
        model.graph.inputs.remove(value)
    model.graph.inputs.extend(inputs)
