"""KV caches in 8 bits: GroupQueryAttention rounds what it appends, and multiplies by what it reads.

One symmetric scale for each feature of a head, fixed before (KIVI, Liu et al. 2024, finds that keys
have their large features in places that don't move). Rows are bit for bit the same alone and among
others: the operator has one kernel for such caches, so they need no `rows_alike`.
"""

from __future__ import annotations

import re
from typing import Protocol

import numpy as np
import onnx_ir as ir

from ..weights import lazy

Array = np.ndarray
INT8 = ir.TensorType(ir.DataType.INT8)
_PAST, _BIAS, _SCALES = 3, 10, 12  # inputs of GroupQueryAttention; keys' first
_NAME = re.compile(r"past_key_values\.(\d+)\.key")


class CacheSteps(Protocol):
    """Of a layer's keys and values: [kv_heads · head_dim] f32 each, above 0."""

    def of(self, layer: int) -> tuple[Array, Array]: ...


class QuantizedCachesPass(ir.passes.InPlacePass):
    """Requires lowered attention over chains; ensures that every cache holds 8 bits."""

    def __init__(self, steps: CacheSteps) -> None:
        super().__init__()
        self.steps = steps

    def requires(self, model: ir.Model) -> None:
        if any(node.op_type == "TensorScatter" for node in model.graph):
            raise ir.passes.PreconditionError("heads of a size that GroupQueryAttention lacks")
        if any(len(node.inputs) > _BIAS for node in _float_caches(model)):
            raise ir.passes.PreconditionError("attention that has a bias, of a tree")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = _float_caches(model)
        for node in nodes:
            self._quantize(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        if _float_caches(model):
            raise ir.passes.PostconditionError("caches in f32")

    def _quantize(self, graph: ir.Graph, node: ir.Node) -> None:
        past = node.inputs[_PAST]
        named = _NAME.fullmatch(str(past.name)) if past is not None else None
        assert named is not None  # the contract's names
        layer = int(named[1])
        keys, values = (
            lazy(graph, f"cache.{layer}.{part}.steps", _made(steps), ir.DataType.FLOAT, steps.shape)
            for part, steps in zip(("key", "value"), self.steps.of(layer), strict=True)
        )
        node.resize_inputs(_SCALES + 2)
        node.replace_input_with(_SCALES, keys)
        node.replace_input_with(_SCALES + 1, values)
        node.attributes["k_quant_type"] = ir.AttrString("k_quant_type", "PER_CHANNEL")
        node.attributes["v_quant_type"] = ir.AttrString("v_quant_type", "PER_CHANNEL")
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", 8)
        for value in (*node.inputs[_PAST : _PAST + 2], *node.outputs[1:3]):
            assert value is not None
            value.type = INT8


def _made(steps: Array):  # type: ignore[no-untyped-def]
    return lambda: steps


def _float_caches(model: ir.Model) -> list[ir.Node]:
    nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    return [node for node in nodes if "kv_cache_bit_width" not in node.attributes]
