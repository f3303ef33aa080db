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
