"""From the exporter's raw graph to the portable one: simplified, with weights still to come."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import optimize_ir
from onnxscript.rewriter import pattern, rewrite

from engines.weights import lazy
from engines.weights import shape as shape_of
from runtime.errors import BuildError

from .quiet import quiet


def make_portable(model: ir.Model) -> ir.Model:
    """Simplify a traced decoder while its weights are only names, and give it `num_logits`."""
    simplify(model)
    _last_rows(model)
    common.RemoveUnusedNodesPass()(model)
    return model


def simplify(model: ir.Model) -> ir.Model:
    """Weights have no value yet, so the library's constant folding cannot touch them."""
    with quiet():  # onnx_ir warns of every initializer without a value
        optimize_ir(model, input_size_limit=4096, output_size_limit=16384)
        common.CommonSubexpressionEliminationPass()(model)
        rewrite(model, pattern_rewrite_rules=[_rows_to_gather])
    common.RemoveUnusedNodesPass()(model)
    return model


def _gather_nd(op, hidden, rows, axes):  # type: ignore[no-untyped-def]
    moved = op.Transpose(hidden, perm=[1, 0, 2])
    picked = op.GatherND(moved, op.Unsqueeze(rows, axes), batch_dims=0)
    return op.Transpose(picked, perm=[1, 0, 2])


def _gather(op, hidden, rows, axes):  # type: ignore[no-untyped-def]
    return op.Gather(hidden, rows, axis=1)


_rows_to_gather = pattern.RewriteRule(_gather_nd, _gather)


def _last_rows(model: ir.Model) -> None:
    """Replace `logit_rows` by the last `num_logits` query rows: the contract's input is a count."""
    graph = model.graph
    inputs = {v.name: v for v in graph.inputs}
    rows = inputs.get("logit_rows")
    if rows is None:
        raise BuildError("trace: received no logit_rows input. Expected one; retrace.")
    count = ir.val("num_logits", ir.DataType.INT64, [])
    one = ir.node("Constant", [], {"value": ir.tensor(np.array(1, np.int64))})
    shape = ir.node("Shape", [inputs["input_ids"]], {"start": 1, "end": 2})
    axes = ir.node("Constant", [], {"value": ir.tensor(np.array([0], np.int64))})
    length = ir.node("Squeeze", [shape.outputs[0], axes.outputs[0]])
    start = ir.node("Sub", [length.outputs[0], count])
    span = ir.node("Range", [start.outputs[0], length.outputs[0], one.outputs[0]])
    span.outputs[0].shape = rows.shape
    span.outputs[0].type = rows.type
    graph.insert_before(graph[0], [one, shape, axes, length, start, span])
    rows.replace_all_uses_with(span.outputs[0])
    graph.inputs[list(graph.inputs).index(rows)] = count


def bind_weights(
    model: ir.Model, load: Callable[[str], np.ndarray], names: dict[str, str] | None = None
) -> None:
    """Give every weight of the graph its maker: `load(checkpoint name) -> [shape] f32`."""
    for name, shape in weight_shapes(model).items():
        value = model.graph.initializers.pop(name)
        make = functools.partial(load, (names or {}).get(name, name))
        value.replace_all_uses_with(lazy(model.graph, name, make, ir.DataType.FLOAT, shape))


def weight_shapes(model: ir.Model) -> dict[str, tuple[int, ...]]:
    """Weights that the graph expects from a checkpoint: name → shape."""
    values = [v for v in model.graph.initializers.values() if v.const_value is None]
    return {str(v.name): shape_of(v) for v in values}


def fix_num_logits(model: ir.Model, rows: int) -> None:
    """Bake the number of projected rows in and take the input away: a draft step projects one."""
    graph = model.graph
    (count,) = [v for v in graph.inputs if v.name == "num_logits"]
    node = ir.node("Constant", [], {"value": ir.tensor(np.array(rows, np.int64))})
    graph.insert_before(graph[0], node)
    count.replace_all_uses_with(node.outputs[0])
    graph.inputs.remove(count)
    logits = next(v for v in graph.outputs if v.name == "logits")
    assert logits.shape is not None
    logits.shape = ir.Shape([logits.shape[0], rows, logits.shape[2]])
