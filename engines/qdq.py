"""Linear layers whose weights and inputs are both in 8 bits, as standard QuantizeLinear pairs.

    x · (1/s) → QuantizeLinear → DequantizeLinear ─┐
                weight · s → DequantizeLinear → Transpose → MatMul

One symmetric scale for a layer's input, one for each row of a weight, both rounded to the graph's
own type before anything is rounded by them; s, where a layer has one, moves what is hard to round
from the input's features into the weight's (SmoothQuant, Xiao et al. 2022). TensorRT builds such
pairs into products of 8-bit numbers; ONNX Runtime's CPU runs them as they stand, which is what an
engine is held against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir

from .matching import drop_dead, replace
from .onnxruntime.projections import Linear, match_linear
from .weights import array, constant, lazy, shape

Array = np.ndarray
FLOAT = np.dtype(np.float32)


class EightBits(Enum):
    """What the pairs round to, and the largest number that they hold."""

    INT8 = "int8"
    FP8 = "fp8"  # E4M3

    @property
    def top(self) -> float:
        return 127.0 if self is EightBits.INT8 else 448.0

    @property
    def onnx_type(self) -> ir.DataType:
        return ir.DataType.INT8 if self is EightBits.INT8 else ir.DataType.FLOAT8E4M3FN

    def rounded(self, values: Array) -> Array:
        """The nearest numbers of this type; beyond its ends the ends."""
        values = np.clip(values, -self.top, self.top)
        if self is EightBits.INT8:
            return np.rint(values).astype(np.int8)
        return values.astype(ml_dtypes.float8_e4m3fn)


class InputScale(Protocol):
    """How a layer's input is rounded."""

    @property
    def scale(self) -> float: ...
    @property
    def smoothing(self) -> Array | None:  # [features] f32, each above 0; None: all 1
        ...


@dataclass(frozen=True, kw_only=True)
class Qdq:
    """`scale_of(name)` by the weight's name in the graph; None leaves the layer as it is.

    scales: the type that the graph will have, as numpy knows it.
    """

    kind: EightBits
    scale_of: Callable[[str], InputScale | None]
    scales: np.dtype = FLOAT

    def row_scales(self, weight: Array) -> Array:
        """[out] f32 of `weight` [out, in]: its largest magnitude is the largest number."""
        return self._steps(np.abs(weight).max(1) / self.kind.top)

    def input_step(self, scale: InputScale) -> Array:
        """[] f32."""
        return self._steps(np.array(scale.scale))

    def rounded_weight(self, weight: Array, scale: InputScale) -> Array:
        """`weight` [out, in] f32 as the product has it, smoothing undone."""
        smooth = np.float32(1) if scale.smoothing is None else scale.smoothing
        moved = weight * smooth
        steps = self.row_scales(moved)[:, None]
        codes = self.kind.rounded(moved / steps).astype(np.float32)
        return (codes * steps / smooth).astype(np.float32)

    def _steps(self, values: Array) -> Array:
        """In the graph's type; 1 for nothing, or too little for the type: all codes are 0."""
        steps = values.astype(self.scales).astype(np.float32)
        return np.where(steps == 0, np.float32(1), steps)


class QdqLinearPass(ir.passes.InPlacePass):
    """Ensures that every linear layer with a scale multiplies numbers of 8 bits."""

    def __init__(self, qdq: Qdq) -> None:
        super().__init__()
        self.qdq = qdq

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        scaled = [
            (linear, scale)
            for linear in map(match_linear, model.graph)
            if linear is not None
            and (scale := self.qdq.scale_of(str(linear.weight.name))) is not None
        ]
        inputs: dict[ir.Value, ir.Value] = {}
        for linear, scale in scaled:
            self._linear(model.graph, linear, scale, inputs)
        if scaled:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(scaled))

    def _linear(
        self,
        graph: ir.Graph,
        linear: Linear,
        scale: InputScale,
        inputs: dict[ir.Value, ir.Value],
    ) -> None:
        """Layers that read one value have one scale, so the input's pair is made once."""
        x = inputs.get(linear.x)
        if x is None:
            x = inputs[linear.x] = self._input(graph, linear, scale)
        weight = self._weight(graph, linear, scale)
        transpose = ir.node("Transpose", [weight], {"perm": [1, 0]})
        product = ir.node("MatMul", [x, transpose.outputs[0]])
        graph.insert_before(linear.matmul, [transpose, product])
        replace(linear.matmul.outputs[0], product.outputs[0])

    def _input(self, graph: ir.Graph, linear: Linear, scale: InputScale) -> ir.Value:
        """x as the pair gives it back."""
        x, name, nodes = linear.x, str(linear.weight.name), list[ir.Node]()
        if scale.smoothing is not None:
            divisor = (1 / scale.smoothing).astype(np.float32)
            factors = _made(graph, f"{name}.unsmoothing", divisor)
            smooth = ir.node("Mul", [x, factors])
            smooth.outputs[0].shape, smooth.outputs[0].type = x.shape, x.type
            nodes, x = [smooth], smooth.outputs[0]
        step = _made(graph, f"{name}.input_scale", self.qdq.input_step(scale))
        zero = _zeros(graph, self.qdq.kind, f"outrider.zero.{self.qdq.kind.value}", ())
        down = ir.node("QuantizeLinear", [x, step, zero])
        up = ir.node("DequantizeLinear", [down.outputs[0], step, zero])
        down.outputs[0].shape = x.shape
        down.outputs[0].type = ir.TensorType(self.qdq.kind.onnx_type)
        up.outputs[0].shape, up.outputs[0].type = x.shape, x.type
        graph.insert_before(linear.matmul, [*nodes, down, up])
        return up.outputs[0]

    def _weight(self, graph: ir.Graph, linear: Linear, scale: InputScale) -> ir.Value:
        """The weight from its codes: [out, in] f32."""
        kind, weight, name = self.qdq.kind, linear.weight, str(linear.weight.name)

        def moved() -> Array:
            return array(weight) * (np.float32(1) if scale.smoothing is None else scale.smoothing)

        def codes() -> Array:
            values = moved()
            return kind.rounded(values / self.qdq.row_scales(values)[:, None])

        rows, features = shape(weight)
        stored = lazy(graph, f"{name}.codes8", codes, kind.onnx_type, (rows, features))
        steps = lazy(
            graph,
            f"{name}.scales8",
            lambda: self.qdq.row_scales(moved()),
            ir.DataType.FLOAT,
            (rows,),
        )
        # Zero points of its own: ONNX Runtime changes them where it moves weights to uint8.
        zeros = _zeros(graph, kind, f"{name}.zeros8", (rows,))
        up = ir.node("DequantizeLinear", [stored, steps, zeros], {"axis": 0})
        up.outputs[0].shape, up.outputs[0].type = ir.Shape([rows, features]), weight.type
        graph.insert_before(linear.matmul, up)
        return up.outputs[0]


def _made(graph: ir.Graph, name: str, values: Array) -> ir.Value:
    """What calibration found takes the graph's own type, as weights do (tensorrt.strong_types)."""
    return lazy(graph, name, lambda: values, ir.DataType.FLOAT, values.shape)


def _zeros(graph: ir.Graph, kind: EightBits, name: str, sizes: tuple[int, ...]) -> ir.Value:
    dtype = np.int8 if kind is EightBits.INT8 else ml_dtypes.float8_e4m3fn
    return constant(graph, name, np.zeros(sizes, dtype))
