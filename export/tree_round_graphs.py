"""The three small graphs of a tree's launched round (`runtime.tree_contract`), without weights.

Index arithmetic and copies alone, in operators that every backend has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass
from onnxscript import GraphBuilder

from engines.external_data import WeightStore, save
from runtime.contract import CacheSpec, GraphSpec
from runtime.tree_contract import CACHES, PATH_ROWS, path_graph, pick_graph, place_graph

from .control_flow import Op
from .graph_signature import name_outputs, typed

OPSET, IR_VERSION = 24, 10
Inputs = Mapping[str, ir.Value]


def write_tree_round(cache: CacheSpec, directory: Path) -> dict[str, Path]:
    """By name; `cache`: the target's, as its engine has it."""
    models = {"pick": pick_model(), "path": path_model(cache), "place": place_model(cache)}
    return {
        name: save(model, name, WeightStore(directory=directory)) for name, model in models.items()
    }


def pick_model() -> ir.Model:
    def pick(op: Op, given: Inputs) -> ir.Value:
        return op.Gather(op.Reshape(given["ranked"], [-1]), given["picks"], axis=0)

    return _model("pick", pick_graph(), pick)


def path_model(cache: CacheSpec) -> ir.Model:
    def rows(op: Op, given: Inputs) -> ir.Value:
        path = op.Reshape(op.Gather(given["paths"], given["last_row"], axis=0), [-1])
        return op.Gather(given[CACHES], op.Add(path, _length(op, given)), axis=2)

    return _model("path", path_graph(cache), rows)


def place_model(cache: CacheSpec) -> ir.Model:
    def placed(op: Op, given: Inputs) -> ir.Value:
        """Row 0 of the tree, the last committed token's, stays where it is."""
        behind = op.Add(_length(op, given), 1)
        return op.TensorScatter(given[CACHES], given[PATH_ROWS], behind, axis=2)

    return _model("place", place_graph(cache), placed)


def _length(op: Op, given: Inputs) -> ir.Value:
    return op.Cast(given["past_lengths"], to=ir.DataType.INT64)


def _model(name: str, spec: GraphSpec, compute: Callable[[Op, Inputs], ir.Value]) -> ir.Model:
    builder = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name))
    inputs = {one.name: builder.input(one.name, *typed(one, {})) for one in spec.inputs}
    outputs = [compute(builder.op, inputs)]
    name_outputs(outputs, spec.outputs, {})
    builder.graph.outputs.extend(outputs)
    model = ir.Model(builder.graph, ir_version=IR_VERSION)
    NameFixPass()(model)
    return model
