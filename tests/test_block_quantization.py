"""Blockwise codes: nearest to the weight, and read by the engine as they were meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from calibration.block_quantization import BlockFormat, QuantizedWeight, dequantize, quantize
from engines.external_data import WeightStore, save
from engines.onnxruntime.quantized import QuantizedLinearPass
from engines.weights import lazy
from export.precision import PRECISIONS

CONTRIB = "com.microsoft"
KINDS = ("normal", "outlier", "positive", "constant", "zero", "tiny", "opposite")
TINY_F32 = float(np.finfo(np.float32).tiny)

formats = st.builds(
    BlockFormat,
    bits=st.sampled_from((4, 8)),
    block=st.sampled_from((16, 32, 64)),
    symmetric=st.booleans(),
)
cases = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def weights(draw: st.DrawFn) -> np.ndarray:
    """[1 … 7, 1 … 200] f32: rows of one kind or of several."""
    rows, features = draw(st.integers(1, 7)), draw(st.integers(1, 200))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=rows, max_size=rows))
    return np.stack([row_of(kind, features, rng) for kind in kinds])


def row_of(kind: str, features: int, rng: np.random.Generator) -> np.ndarray:
    row = rng.standard_normal(features).astype(np.float32) * 0.02
    if kind == "outlier":
        row[rng.integers(features)] = 30.0
    elif kind == "positive":
        row = np.abs(row) + 1
    elif kind == "constant":
        row[:] = row[0]
    elif kind == "zero":
        row[:] = 0
    elif kind == "tiny":
        row *= 1e-37
    elif kind == "opposite":  # as far to one side as to the other
        row = np.where(rng.random(features) < 0.5, -1, 1).astype(np.float32)
    return row


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """The layout's definition, read bit by bit: low-order codes first."""
    stream = np.unpackbits(packed, axis=-1, bitorder="little")
    digits = stream.reshape(*packed.shape[:-1], -1, bits)
    return (digits * (1 << np.arange(bits))).sum(-1)


def zeros_of(quantized: QuantizedWeight, fmt: BlockFormat) -> np.ndarray:
    """Zero points [out, blocks]."""
    if quantized.zero_points is None:
        return np.full(quantized.scales.shape, 1 << (fmt.bits - 1))
    return unpacked(quantized.zero_points, fmt.bits)[:, : quantized.scales.shape[1]]


@cases
@given(weights(), formats)
def test_every_weight_gets_the_nearest_code(weight: np.ndarray, fmt: BlockFormat) -> None:
    """Within half a step; only a symmetric block's other end lies up to a whole step outside."""
    quantized = quantize(weight, fmt)
    received = dequantize(quantized, fmt, weight.shape[1])
    assert received.dtype == np.float32
    assert received.shape == weight.shape
    per_weight = [np.repeat(a, fmt.block, 1) for a in (quantized.scales, zeros_of(quantized, fmt))]
    scale, zero = (a[:, : weight.shape[1]].astype(np.float64) for a in per_weight)
    step, top = np.abs(scale), (1 << fmt.bits) - 1
    ends = np.sort([-zero * scale, (top - zero) * scale], axis=0)
    outside = np.maximum(0, np.maximum(ends[0] - weight, weight - ends[1]))
    error = np.abs(received.astype(np.float64) - weight)
    assert (error <= np.maximum(step / 2, outside) * (1 + 1e-4) + TINY_F32).all()
    slack = 1.0 if fmt.symmetric else 0.5
    assert (outside <= slack * step * (1 + 1e-4) + TINY_F32).all()


@cases
@given(weights(), formats)
def test_codes_are_packed_low_first(weight: np.ndarray, fmt: BlockFormat) -> None:
    """And the last zero point of an odd number of blocks fills its byte's lower half."""
    quantized, blocks = quantize(weight, fmt), fmt.blocks(weight.shape[1])
    rows = weight.shape[0]
    assert quantized.codes.shape == (rows, blocks, fmt.blob_bytes)
    assert quantized.scales.shape == (rows, blocks)
    assert (quantized.codes.dtype, quantized.scales.dtype) == (np.uint8, np.float32)
    codes, zeros = unpacked(quantized.codes, fmt.bits), zeros_of(quantized, fmt)
    assert codes.shape == (rows, blocks, fmt.block)
    if quantized.zero_points is not None:
        width = fmt.zero_point_bytes(weight.shape[1])
        assert width == (blocks + 1) // 2 if fmt.bits == 4 else blocks
        assert quantized.zero_points.shape == (rows, width)
        assert quantized.zero_points.dtype == np.uint8
    expected = (codes - zeros[..., None]) * quantized.scales[..., None].astype(np.float64)
    received = dequantize(quantized, fmt, weight.shape[1])
    np.testing.assert_allclose(received, expected.reshape(rows, -1)[:, : weight.shape[1]], 1e-6)


@cases
@given(weights(), formats)
def test_zero_stays_zero(weight: np.ndarray, fmt: BlockFormat) -> None:
    """Padding is zeros: it must add nothing to a product."""
    weight = np.where(np.arange(weight.shape[1]) % 3, weight, np.float32(0))
    received = dequantize(quantize(weight, fmt), fmt, weight.shape[1])
    assert (received[weight == 0] == 0).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_twice_changes_nothing_more(name: str) -> None:
    """So the weights that parity is checked with are those of the engine."""
    weight = np.random.default_rng(0).standard_normal((8, 96), np.float32)
    once = PRECISIONS[name].rounded(weight)
    np.testing.assert_allclose(PRECISIONS[name].rounded(once), once, atol=1e-6)


@pytest.mark.parametrize(("bits", "block"), [(3, 32), (4, 8), (8, 48), (4, 0)])
def test_formats_that_no_kernel_has(bits: int, block: int) -> None:
    with pytest.raises(ValueError, match=f"received {bits} bits, blocks of {block}"):
        BlockFormat(bits=bits, block=block, symmetric=True)


# Against ONNX Runtime's kernels


def session(
    node: onnx.NodeProto, parts: dict[str, np.ndarray], x: np.ndarray
) -> ort.InferenceSession:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in parts.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def parts_of(quantized: QuantizedWeight) -> dict[str, np.ndarray]:
    parts = {"codes": quantized.codes, "scales": quantized.scales}
    if quantized.zero_points is not None:
        parts["zeros"] = quantized.zero_points
    return parts


@cases
@given(weights(), formats, st.sampled_from((1, 5, 33)))
def test_matmul_nbits_multiplies_by_the_dequantized(
    weight: np.ndarray, fmt: BlockFormat, rows: int
) -> None:
    """Also where the last block is padded, and with an odd number of packed zero points."""
    out_features, features = weight.shape
    x = np.random.default_rng(rows).standard_normal((rows, features), np.float32)
    quantized = quantize(weight, fmt)
    parts = parts_of(quantized)
    node = helper.make_node(
        "MatMulNBits", ["x", *parts], ["y"], domain=CONTRIB,
        K=features, N=out_features, bits=fmt.bits, block_size=fmt.block, accuracy_level=1,
    )  # fmt: skip
    (y,) = session(node, parts, x).run(None, {"x": x})
    dense = dequantize(quantized, fmt, features).astype(np.float64)
    # f32 sums of `features` products, in whatever order
    bound = np.abs(x.astype(np.float64)) @ np.abs(dense).T * features * 2**-23 + 1e-30
    assert (np.abs(y - x @ dense.T) <= bound).all()


@cases
@given(weights(), formats)
def test_gather_block_quantized_reads_the_dequantized(weight: np.ndarray, fmt: BlockFormat) -> None:
    """Bit for bit, from the same codes as the product's; its rows are whole blocks."""
    features = fmt.blocks(weight.shape[1]) * fmt.block
    table = np.resize(weight, (weight.shape[0], features))
    quantized = quantize(table, fmt)
    parts = parts_of(quantized)
    parts["codes"] = quantized.codes.reshape(len(table), -1)
    ids = np.array([[len(table) - 1, 0, len(table) // 2]])
    node = helper.make_node(
        "GatherBlockQuantized", ["codes", "x", *list(parts)[1:]], ["y"], domain=CONTRIB,
        bits=fmt.bits, block_size=fmt.block, gather_axis=0, quantize_axis=1,
    )  # fmt: skip
    (y,) = session(node, parts, ids).run(None, {"x": ids})
    np.testing.assert_array_equal(y, dequantize(quantized, fmt, features)[ids])


# The pass that writes both


def tied(width: int, rows: int = 50) -> tuple[ir.Model, np.ndarray]:
    """logits = table[ids] @ table.T: an embedding and the head that is tied to it."""
    weight = np.random.default_rng(width).standard_normal((rows, width), np.float32)
    ids, logits = ir.val("input_ids", ir.DataType.INT64, [3]), ir.val("logits", ir.DataType.FLOAT)
    graph = ir.Graph([ids], [logits], nodes=[], opset_imports={"": 20}, name="tied")
    table = lazy(graph, "embed.weight", lambda: weight, ir.DataType.FLOAT, weight.shape)
    gather = ir.node("Gather", [table, ids], {"axis": 0})
    transpose = ir.node("Transpose", [table], {"perm": [1, 0]})
    matmul = ir.node("MatMul", [gather.outputs[0], transpose.outputs[0]], outputs=[logits])
    graph.extend([gather, transpose, matmul])
    return ir.Model(graph, ir_version=10), weight


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("width", [64, 96, 40])
def test_embedding_with_whole_blocks_is_quantized_and_stored_once(
    tmp_path: Path, precision: str, width: int
) -> None:
    """A table whose rows end inside a block stays f32; the head is quantized all the same."""
    chosen = PRECISIONS[precision]
    assert chosen.format is not None
    quantizer = chosen.quantizer()
    assert quantizer is not None
    quantizer = type(quantizer)(
        format_of=quantizer.format_of, quantize=quantizer.quantize, accuracy_level=1
    )
    model, weight = tied(width)
    assert QuantizedLinearPass(quantizer)(model).modified
    whole = width % chosen.format.block == 0
    lookup = "GatherBlockQuantized" if whole else "Gather"
    assert sorted(node.op_type for node in model.graph) == sorted([lookup, "MatMulNBits"])

    path = save(model, "graph", WeightStore(directory=tmp_path))
    ids = np.array([3, 0, 49])
    (logits,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(
        None, {"input_ids": ids}
    )
    rounded = chosen.rounded(weight)
    embedded = (rounded if whole else weight)[ids]
    np.testing.assert_allclose(logits, embedded @ rounded.T, rtol=1e-4, atol=1e-4)

    codes = sum(a.nbytes for a in parts_of(quantize(weight, chosen.format)).values())
    pages = sum(p.stat().st_size for p in tmp_path.iterdir())
    most = codes + (0 if whole else weight.nbytes) + 4 * 4096  # starts of weights, the graph
    assert pages <= most


def test_nothing_to_quantize_is_no_change() -> None:
    x, y = ir.val("x", ir.DataType.FLOAT, [3]), ir.val("y", ir.DataType.FLOAT, [3])
    nodes = [ir.node("Relu", [x], outputs=[y])]
    graph = ir.Graph([x], [y], nodes=nodes, opset_imports={"": 20}, name="plain")
    quantizer = PRECISIONS["int4"].quantizer()
    assert quantizer is not None
    assert not QuantizedLinearPass(quantizer)(ir.Model(graph, ir_version=10)).modified
