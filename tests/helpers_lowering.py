"""Small graphs for pass tests: ONNX text, weights still to come, and a run on ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from engines.weights import lazy

Array = np.ndarray


def graph_of(text: str, weights: Mapping[str, Array]) -> ir.Model:
    """A model whose inputs named in `weights` become weights that are made when asked for."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 24]>\n{text}')
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True))
    for value in list(model.graph.inputs):
        if value.name in weights:
            array = weights[value.name]
            model.graph.inputs.remove(value)
            value.replace_all_uses_with(
                lazy(model.graph, value.name, _maker(array), ir.DataType.FLOAT, array.shape)
            )
    return model


def _maker(array: Array) -> Callable[[], Array]:
    return lambda: array


def run(model: ir.Model, feed: Mapping[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(feed))


def operators(model: ir.Model) -> Counter[str]:
    """How many of each, constants not counted."""
    return Counter(node.op_type for node in model.graph if node.op_type != "Constant")


def check_same(
    model: ir.Model, step: ir.passes.PassBase, feed: Mapping[str, Array], atol: float = 1e-5
) -> None:
    """Apply `step` in place: it reports a change, outputs stay, a second time finds none."""
    before = run(model, feed)
    assert step(model).modified
    after = run(model, feed)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, atol=atol, rtol=1e-4)
    assert not step(model).modified


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
