"""A written graph in f32 arithmetic: what parity is judged on, apart from the engine's rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx


@contextlib.contextmanager
def exact_arithmetic(path: Path) -> Iterator[Path]:
    """The same graph and weights, told not to round activations; gone afterwards."""
    model = onnx.load(path, load_external_data=False)
    _skip_pairs(model.graph)
    _widen_caches(model.graph)
    for node in _nodes(model.graph):
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    variant = path.with_suffix(".exact.onnx")  # beside the data that it refers to
    variant.write_bytes(model.SerializeToString())
    try:
        yield variant
    finally:
        variant.unlink()


def _skip_pairs(graph: onnx.GraphProto) -> None:
    """Let what a QuantizeLinear pair rounds pass as it is.

    A weight's DequantizeLinear becomes a product: beside a plain MatMul the engine would take it
    for a MatMulNBits, and round activations after all.
    """
    source = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "QuantizeLinear"}
    if not source:
        return
    weights = {t.name for t in graph.initializer if len(t.dims) == 2}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in source:
            nodes.append(onnx.helper.make_node("Identity", [source[node.input[0]]], node.output))
        elif node.op_type == "DequantizeLinear" and node.input[0] in weights:
            nodes += _scaled_rows(node.input[0], node.input[1], node.output[0])
        else:
            nodes.append(node)
    if len(nodes) > len(graph.node):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), _LAST_AXIS))
    kept = onnx.GraphProto()
    kept.node.extend(nodes)
    graph.ClearField("node")
    graph.node.extend(kept.node)


def _widen_caches(graph: onnx.GraphProto) -> None:
    """Caches of 8 bits are f32 here."""
    values = {v.name: v for v in (*graph.input, *graph.output)}
    for node in graph.node:
        if node.op_type != "GroupQueryAttention" or len(node.input) <= _CACHE_STEPS:
            continue
        del node.input[_CACHE_STEPS:]
        kept = [a for a in node.attribute if a.name not in _CACHE_ATTRIBUTES]
        del node.attribute[:]
        node.attribute.extend(kept)
        for name in (*node.input[3:5], *node.output[1:3]):
            values[name].type.tensor_type.elem_type = onnx.TensorProto.FLOAT


_CACHE_STEPS = 12  # input of GroupQueryAttention, and the next
_CACHE_ATTRIBUTES = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")
_LAST_AXIS = "outrider.exact.axis"


def _scaled_rows(codes: str, scales: str, out: str) -> list[onnx.NodeProto]:
    make = onnx.helper.make_node
    return [
        make("Cast", [codes], [f"{out}.codes"], to=onnx.TensorProto.FLOAT),
        make("Unsqueeze", [scales, _LAST_AXIS], [f"{out}.scales"]),
        make("Mul", [f"{out}.codes", f"{out}.scales"], [out]),
    ]


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Of the graph and of those inside its nodes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)
