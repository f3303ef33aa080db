"""What ONNX Runtime's CUDA provider has kernels for, and a check that a graph asks for no more.

Read, not tried: from docs/OperatorKernels.md and the sources of ONNX Runtime (contrib_ops/cuda,
core/providers/cuda), held against the names and messages in onnxruntime-gpu 1.31.1's library. On a
GPU the session says the same by itself, since no fallback is allowed; here the build says it first.

Types are those of a node's data inputs, at opset 18. What was established of the contrib operators:

    GroupQueryAttention   f16 and bf16, no f32; caches of the same type on one buffer; angles of the
                          same type; `total_sequence_length` in host memory, a bound of the rows
                          (it is a "first prompt" where it equals the query's length); `seqlens_k`
                          on the device; `position_ids` i64. `attention_bias` since 1.31, by
                          unfused kernels: earlier ones refuse it. So trees aren't built for it.
    MatMulNBits           f16; 4 and 8 bits (and 2), blocks of 16 to 128 fused for few rows, else
                          dequantized before a product; no zero points: the middle code; no
                          accuracy level: activations are never rounded; a bias since 1.31.
    GatherBlockQuantized  uint8 codes of 4 or 8 bits, f16 scales, i64 indices
    Skip(Simplified)LayerNormalization, SimplifiedLayerNormalization, QuickGelu, FastGelu   f16
    Loop                  its condition is read on the host: it runs, but no CUDA graph holds it
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from runtime.errors import BuildError

_F, _H, _I32, _I64, _B = (ir.DataType[n] for n in ("FLOAT", "FLOAT16", "INT32", "INT64", "BOOL"))
_REAL = frozenset({_F, _H})
_NUMBERS = frozenset({_F, _H, _I32, _I64})
_ANY = frozenset({_F, _H, _I32, _I64, _B})

KERNELS: Mapping[str, frozenset[ir.DataType]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Min", "Max"), _NUMBERS),
    **dict.fromkeys(("Greater", "GreaterOrEqual", "Less", "LessOrEqual"), _NUMBERS),
    **dict.fromkeys(("Abs", "Neg", "TopK", "CumSum"), _NUMBERS),
    **dict.fromkeys(("ReduceMax", "ReduceMin", "ReduceSum"), _NUMBERS),
    **dict.fromkeys(("Exp", "Reciprocal", "Relu", "Sigmoid", "Tanh", "Softmax"), _REAL),
    **dict.fromkeys(("Sqrt", "Sin", "Cos", "Erf", "ReduceMean", "MatMul", "ArgMax"), _REAL),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization"), _REAL),
    **dict.fromkeys(("And", "Or", "Not"), frozenset({_B})),
    **dict.fromkeys(("Cast", "Concat", "Expand", "Gather", "GatherElements", "Identity"), _ANY),
    **dict.fromkeys(("Reshape", "ScatterElements", "Slice", "Split", "Squeeze", "Tile"), _ANY),
    **dict.fromkeys(("Transpose", "Trilu", "Unsqueeze"), _ANY),
    "Clip": frozenset({_F, _H, _I64}),
    "Equal": _ANY,
    "GatherND": frozenset({_F, _H, _I64, _B}),
    "OneHot": frozenset({_F, _H, _I64}),
    "Pad": frozenset({_F, _H, _B}),
    "Pow": _NUMBERS,
    "Where": _NUMBERS,
    "Loop": _ANY,
    "com.microsoft::GroupQueryAttention": frozenset({_H}),
    "com.microsoft::MatMulNBits": _REAL,
    "com.microsoft::GatherBlockQuantized": _REAL,
    "com.microsoft::SkipLayerNormalization": _REAL,
    "com.microsoft::SkipSimplifiedLayerNormalization": _REAL,
    "com.microsoft::QuickGelu": _REAL,
    "com.microsoft::FastGelu": _REAL,
    "com.microsoft::Gelu": _REAL,
}
# Where the data isn't the first input: what is picked from, filled in, or scaled.
_DATA = {"Where": 1, "OneHot": 2, "com.microsoft::GatherBlockQuantized": 2}
# Their results lie in the host's memory, and the CPU provider gets whatever reads them.
_ON_HOST = {"Shape", "Size", "Range", "ConstantOfShape", "NonZero"}


def check_kernels(name: str, model: ir.Model) -> None:
    """Raises BuildError where the provider would leave a node of the graph to the CPU."""
    bad = sorted({why for node in model.graph.all_nodes() if (why := _refused(node))})
    if bad:
        raise BuildError(
            f"--backend onnxruntime-cuda: received {name} with {'; '.join(bad[:3])}. Expected "
            "operators and types that the CUDA provider has kernels for, and no computing with "
            "sizes; use --backend onnxruntime or tensorrt-rtx, and please report the model with "
            "its config.json."
        )


def _refused(node: ir.Node) -> str:
    """Why, or nothing."""
    kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    if kind == "Constant":
        return ""
    if kind in _ON_HOST:
        return f"{kind}, which is computed on the CPU"
    if kind not in KERNELS:
        return f"{kind}, which has no kernel"
    dtype = _dtype(node, _DATA.get(kind, 0))
    if dtype is not None and dtype not in KERNELS[kind]:
        return f"{kind} over {dtype.name.lower()}, which has no kernel"
    return ""


def _dtype(node: ir.Node, place: int) -> ir.DataType | None:
    """None where the graph doesn't say."""
    value = node.inputs[place] if place < len(node.inputs) else None
    return value.dtype if value is not None else None
