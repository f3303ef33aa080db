"""Linear layers → MatMulNBits, the embedding → GatherBlockQuantized; all by weights still to come.

How a weight becomes codes is the caller's business (`Quantizer`); this pass only rewires the
graph. Codes, scales and zero points of one weight are made together, once, when they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir

from ..matching import drop_dead, producer, replace
from ..weights import array, is_weight, lazy, shape
from .projections import Linear, match_linear


class BlockFormat(Protocol):
    """How codes are laid out; see calibration.block_quantization."""

    @property
    def bits(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def half_scales(self) -> bool: ...
    @property
    def blob_bytes(self) -> int: ...
    def blocks(self, features: int) -> int: ...
    def zero_point_bytes(self, features: int) -> int: ...


class Quantized(Protocol):
    @property
    def codes(self) -> np.ndarray: ...
    @property
    def scales(self) -> np.ndarray: ...
    @property
    def zero_points(self) -> np.ndarray | None: ...


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """`quantize(weight [out, in] f32, name)` → codes, scales, zero points in `format_of(name)`.

    A name is the weight's in the graph: the checkpoint's, joined ones as `a+b`.
    """

    format_of: Callable[[str], BlockFormat]
    quantize: Callable[[np.ndarray, str], Quantized]
    accuracy_level: int = 4  # MatMulNBits: 4 multiplies by activations rounded to int8


class QuantizedLinearPass(ir.passes.InPlacePass):
    """Ensures that no MatMul by a weight and no lookup of a token in a weight is left in f32.

    But for a table whose rows aren't whole blocks: MatMulNBits knows the width of a padded row,
    GatherBlockQuantized doesn't.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        linears = [n for n in model.graph if match_linear(n) is not None]
        tables = [n for n in model.graph if n.op_type == "Gather" and _reads_embedding(n)]
        tables = [n for n in tables if self._in_whole_blocks(n.inputs[0])]  # type: ignore[arg-type]
        parts = _Parts(model.graph, self.quantizer)
        for node in linears:
            linear = match_linear(node)  # anew: what it reads may be a layer replaced just now
            if linear is not None:
                self._linear(model.graph, linear, parts)
        for table in tables:
            self._table(model.graph, table, parts)
        if linears or tables:
            drop_dead(model)
            model.graph.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=bool(linears or tables))

    def _in_whole_blocks(self, table: ir.Value) -> bool:
        sizes, fmt = shape(table), self.quantizer.format_of(str(table.name))
        return len(sizes) == 2 and sizes[1] % fmt.block == 0

    def _linear(self, graph: ir.Graph, linear: Linear, parts: _Parts) -> None:
        out_features, features = shape(linear.weight)
        codes, scales, zero_points = parts.of(linear.weight)
        fmt = self.quantizer.format_of(str(linear.weight.name))
        node = ir.node(
            "MatMulNBits",
            [linear.x, codes, scales, zero_points, None, linear.bias],
            {
                "K": features,
                "N": out_features,
                "bits": fmt.bits,
                "block_size": fmt.block,
                "accuracy_level": self.quantizer.accuracy_level,
            },
            domain="com.microsoft",
        )
        graph.insert_before(linear.out.producer() or linear.matmul, node)
        replace(linear.out, node.outputs[0])

    def _table(self, graph: ir.Graph, gather: ir.Node, parts: _Parts) -> None:
        weight, indices = gather.inputs[0], gather.inputs[1]
        assert weight is not None
        codes, scales, zero_points = parts.of(weight, flat=True)
        fmt = self.quantizer.format_of(str(weight.name))
        node = ir.node(
            "GatherBlockQuantized",
            [codes, indices, scales, zero_points],
            {
                "bits": fmt.bits,
                "block_size": fmt.block,
                "gather_axis": 0,
                "quantize_axis": 1,
            },
            domain="com.microsoft",
        )
        graph.insert_before(gather, node)
        replace(gather.outputs[0], node.outputs[0])


def _reads_embedding(gather: ir.Node) -> bool:
    """Rows of a weight by token. A table of positions is small, and stays as it is."""
    rows = gather.inputs[1]
    while (shaped := producer(rows, "Reshape", "Identity")) is not None:
        rows = shaped.inputs[0]
    return is_weight(gather.inputs[0]) and rows is not None and rows.name == "input_ids"


class _Parts:
    """Codes, scales and zero points of weights as initializers made together."""

    def __init__(self, graph: ir.Graph, quantizer: Quantizer) -> None:
        self.graph, self.quantizer = graph, quantizer
        self._last: tuple[str, Quantized] | None = None
        self._widened: dict[str, ir.Value] = {}

    def of(
        self, weight: ir.Value, *, flat: bool = False
    ) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """`flat` gives codes as a table [out, bytes]: the same bytes as [out, blocks, blob]."""
        name = str(weight.name)
        fmt = self.quantizer.format_of(name)
        rows, features = shape(weight)
        blocks = fmt.blocks(features)
        code_shape = (rows, blocks * fmt.blob_bytes) if flat else (rows, blocks, fmt.blob_bytes)
        suffix = ".table" if flat else ""
        u8 = ir.DataType.UINT8
        codes = lazy(
            self.graph,
            f"{name}.codes{suffix}",
            lambda: self._made(weight).codes.reshape(code_shape),
            u8,
            code_shape,
        )
        if flat:  # the same bytes as the product's codes: external data stores them once
            codes.metadata_props["outrider.same_bytes_as"] = f"{name}.codes"
        scales = self._scales(weight, fmt, (rows, blocks))
        if fmt.symmetric:
            return codes, scales, None
        zero_shape = (rows, fmt.zero_point_bytes(features))
        zeros = lazy(self.graph, f"{name}.zeros", lambda: self._zeros(weight), u8, zero_shape)
        return codes, scales, zeros

    def _scales(self, weight: ir.Value, fmt: BlockFormat, sizes: tuple[int, int]) -> ir.Value:
        """f32 as the operators want them; half ones are made so when the engine loads the graph."""
        name = f"{weight.name}.scales"
        if not fmt.half_scales:
            return lazy(
                self.graph, name, lambda: self._made(weight).scales, ir.DataType.FLOAT, sizes
            )
        if name not in self._widened:
            stored = lazy(
                self.graph,
                name,
                lambda: self._made(weight).scales.astype(np.float16),
                ir.DataType.FLOAT16,
                sizes,
            )
            cast = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT})
            cast.outputs[0].shape = ir.Shape(sizes)
            cast.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
            self.graph.insert_before(self.graph[0], cast)
            self._widened[name] = cast.outputs[0]
        return self._widened[name]

    def _zeros(self, weight: ir.Value) -> np.ndarray:
        zeros = self._made(weight).zero_points
        if zeros is None:
            raise ValueError(f"{weight.name}: an asymmetric format without zero points")
        return zeros

    def _made(self, weight: ir.Value) -> Quantized:
        name = str(weight.name)
        if self._last is None or self._last[0] != name:
            self._last = None  # let the previous weight go before the next one is made
            self._last = (name, self.quantizer.quantize(array(weight), name))
        return self._last[1]
