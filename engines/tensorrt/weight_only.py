"""Linear layers on weights of few bits: `DequantizeLinear` before each product, and nothing else.

Symmetric scales from the largest magnitude: of a row of outputs (8 bits, fp8), or of `block`
neighbours along the input features (4 bits). Scales are rounded to the graph's own type before the
codes are made, so that codes and scales fit each other. The embedding table keeps its type: it is
read row by row, and a quantized table would be unpacked whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..matching import drop_dead, replace
from ..onnxruntime.projections import Linear, match_linear
from ..weights import array, lazy, shape

Array = np.ndarray
FLOAT = ir.DataType.FLOAT
_CODES = {
    "int8": (ir.DataType.INT8, np.dtype(np.int8), 127.0),
    "int4": (ir.DataType.INT4, np.dtype(ml_dtypes.int4), 7.0),
    "fp8": (ir.DataType.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
    "fp4": (ir.DataType.FLOAT4E2M1, np.dtype(ml_dtypes.float4_e2m1fn), 6.0),
}


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """`kind`: int8, int4, fp8 or fp4; `block` None: one scale a row of outputs.

    `scales`: the graph's own type, fp16 or bf16, as numpy knows it.
    """

    kind: str
    block: int | None
    scales: np.dtype

    def __post_init__(self) -> None:
        if self.kind not in _CODES:
            raise ValueError(f"kind: received {self.kind!r}. Expected one of {', '.join(_CODES)}.")

    @property
    def dtype(self) -> ir.DataType:
        return _CODES[self.kind][0]

    def fits(self, features: int) -> bool:
        """TensorRT's blocks are whole."""
        return self.block is None or features % self.block == 0

    def quantize(self, weight: Array) -> tuple[Array, Array]:
        """[out, in] f32 → codes [out, in], scales [out] or [out, in / block] f32."""
        _, dtype, top = _CODES[self.kind]
        blocks = weight.reshape(len(weight), -1, self.block or weight.shape[1])
        scales = np.abs(blocks).max(-1) / top
        scales = scales.astype(self.scales).astype(np.float32)
        scales[scales == 0] = 1.0  # nothing, or too small for the type: the codes are 0
        ratio = np.clip(blocks / scales[..., None], -top, top)
        if self.kind.startswith("int"):
            ratio = np.rint(ratio)
        codes = ratio.astype(dtype).reshape(weight.shape)
        return codes, scales if self.block else scales[:, 0]

    def rounded(self, weight: Array) -> Array:
        """What the engine multiplies by: [out, in] f32."""
        codes, scales = self.quantize(weight)
        width = self.block or weight.shape[1]
        return codes.astype(np.float32) * np.repeat(scales.reshape(len(weight), -1), width, axis=1)


class UnpackPass(ir.passes.InPlacePass):
    """Ensures that no weight has a type that ONNX Runtime's CPU can't dequantize: what the engine
    multiplies by is made when the graph is written, in f32. Of graphs that gates run."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if _is_fp4(node)]
        for node in found:
            out, (codes, scales) = node.outputs[0], (v for v in node.inputs if v is not None)
            make, name = partial(_unpacked, codes, scales), f"{codes.name}.unpacked"
            replace(out, lazy(model.graph, name, make, FLOAT, shape(out)))
        if found:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(found))


def _is_fp4(node: ir.Node) -> bool:
    return (
        node.op_type == "DequantizeLinear"
        and node.inputs[0] is not None
        and node.inputs[0].dtype == ir.DataType.FLOAT4E2M1
    )


def _unpacked(codes: ir.Value, scales: ir.Value) -> Array:
    width = shape(codes)[1] // shape(scales)[1]
    return array(codes).astype(np.float32) * np.repeat(array(scales), width, axis=1)


class SolvedCodes(Protocol):
    """Codes that calibration chose, by the name of a weight."""

    def joined(self, part: str) -> str | None: ...
    def codes(self, name: str, sizes: tuple[int, ...]) -> tuple[Array, Array]:
        """[out, in] whole numbers about 0, scales [out, in / block] f32, all above 0."""
        ...


class WeightOnlyPass(ir.passes.InPlacePass):
    """Ensures that no product by a weight whose rows are whole blocks reads it unquantized.

    solved: of these weights alone, with its codes; None rounds every one to nearest.
    """

    def __init__(self, fmt: WeightFormat, solved: SolvedCodes | None = None) -> None:
        super().__init__()
        self.format, self.solved = fmt, solved

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        linears = [match_linear(node) for node in model.graph]
        found = [one for one in linears if one and self._takes(one.weight)]
        for linear in found:
            self._rewrite(model.graph, linear)
        if found:
            drop_dead(model)
        return ir.passes.PassResult(model, modified=bool(found))

    def _takes(self, weight: ir.Value) -> bool:
        known = self.solved is None or self.solved.joined(str(weight.name)) is not None
        return known and self.format.fits(shape(weight)[1])

    def _quantize(self, weight: ir.Value) -> tuple[Array, Array]:
        if self.solved is None:
            return self.format.quantize(array(weight))
        codes, scales = self.solved.codes(str(weight.name), shape(weight))
        return codes.astype(self.format.dtype.numpy()), scales

    def _rewrite(self, graph: ir.Graph, linear: Linear) -> None:
        codes, scales = self._parts(graph, linear.weight)
        blocked: dict[str, int] = {"axis": 0}
        if self.format.block:
            blocked = {"axis": 1, "block_size": self.format.block}
        rounded = ir.node("DequantizeLinear", [codes, scales], blocked)
        rounded.outputs[0].shape, rounded.outputs[0].type = linear.weight.shape, linear.weight.type
        transpose = linear.matmul.inputs[1].producer()  # type: ignore[union-attr]
        assert transpose is not None
        turned = ir.node("Transpose", [rounded.outputs[0]], dict(transpose.attributes))
        turned.outputs[0].shape, turned.outputs[0].type = (
            transpose.outputs[0].shape,
            transpose.outputs[0].type,
        )
        graph.insert_before(linear.matmul, [rounded, turned])
        linear.matmul.replace_input_with(1, turned.outputs[0])

    def _parts(self, graph: ir.Graph, weight: ir.Value) -> tuple[ir.Value, ir.Value]:
        rows, features = shape(weight)
        fmt, name = self.format, str(weight.name)
        scale_shape = (rows, features // fmt.block) if fmt.block else (rows,)
        codes = lazy(
            graph,
            f"{name}.codes",
            lambda: self._quantize(weight)[0],
            fmt.dtype,
            (rows, features),
        )
        scales = lazy(
            graph,
            f"{name}.scales",
            lambda: self._quantize(weight)[1],
            ir.DataType.FLOAT,
            scale_shape,
        )
        return codes, scales
