"""Blockwise round-to-nearest weights, in the layout of ONNX Runtime's MatMulNBits.

A block is `block` neighbours along the input features of one output row; it has one scale and, if
asymmetric, one zero point: w ≈ (code - zero_point) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ALL = np.float32(1)


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """How weights are stored: `bits` 4 or 8, `block` a power of two of at least 16.

    half_scales: scales are rounded to f16, and stored so. even: codes reach as far down as up, and
    scales are above 0, as TensorRT wants them; else the lowest code is used, too.
    """

    bits: int
    block: int
    symmetric: bool
    half_scales: bool = False
    even: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.block < 16 or self.block & (self.block - 1):
            raise ValueError(
                f"block format: received {self.bits} bits, blocks of {self.block}. Expected 4 or "
                "8 bits and a power of two of at least 16."
            )

    def blocks(self, features: int) -> int:
        return -(-features // self.block)

    @property
    def blob_bytes(self) -> int:
        """Bytes of one block's codes."""
        return self.block * self.bits // 8

    @property
    def bottom(self) -> int:
        """The lowest code."""
        return int(self.even)

    @property
    def top(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1

    def zero_point_bytes(self, features: int) -> int:
        """Bytes of one row's packed zero points."""
        return -(-self.blocks(features) * self.bits // 8)


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    codes: np.ndarray  # [out, blocks, blob_bytes] u8, low-order codes first
    scales: np.ndarray  # [out, blocks] f32; with half_scales every one of them an f16 number
    zero_points: np.ndarray | None  # [out, zero_point_bytes] u8, packed alike; None: 2^(bits-1)


def quantize(weight: np.ndarray, fmt: BlockFormat) -> QuantizedWeight:
    """Round `weight` [out, in] f32 to the nearest codes of its blocks."""
    return round_to(weight, *steps(weight, fmt), fmt)


def round_to(
    weight: np.ndarray, scales: np.ndarray, zeros: np.ndarray, fmt: BlockFormat
) -> QuantizedWeight:
    """The same with given steps; what lies beyond them gets the nearest code."""
    blocks = _blocked(weight, fmt)  # [out, blocks, block]
    ratio = np.rint(blocks / scales[..., None]) + zeros[..., None]
    return packed(np.clip(ratio, fmt.bottom, fmt.top), scales, zeros, fmt)


def steps(
    weight: np.ndarray, fmt: BlockFormat, part: np.ndarray | np.float32 = ALL
) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point of each block of `weight` [out, in]: [out, blocks] f32 each.

    part: of a symmetric block's range that codes reach over, one number or [out, blocks].
    """
    blocks = _blocked(weight, fmt)
    scales, zeros = (_symmetric if fmt.symmetric else _asymmetric)(blocks, fmt.bits)
    if fmt.even:
        scales, zeros = _even(blocks, fmt.bits)
    scales = scales * part
    return as_stored(scales, fmt), zeros


def as_stored(scales: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    """Scales as the format keeps them, never 0: f32."""
    return _nonzero(_as_half(scales)) if fmt.half_scales else scales


def packed(
    codes: np.ndarray,  # [out, blocks, block], whole numbers from 0 to fmt.top
    scales: np.ndarray,  # [out, blocks]
    zeros: np.ndarray,  # [out, blocks]
    fmt: BlockFormat,
) -> QuantizedWeight:
    """Codes in the layout that the engine reads."""
    return QuantizedWeight(
        codes=_pack(codes.astype(np.uint8), fmt.bits),
        scales=scales,
        zero_points=None if fmt.symmetric else _pack_rows(zeros.astype(np.uint8), fmt.bits),
    )


def signed_codes(quantized: QuantizedWeight, fmt: BlockFormat) -> np.ndarray:
    """Of a symmetric format, with 0 for 0: [out, padded features] i8."""
    codes = _unpack(quantized.codes, fmt.bits).astype(np.int8) - np.int8(1 << (fmt.bits - 1))
    return codes.reshape(codes.shape[0], -1)


def dequantize(quantized: QuantizedWeight, fmt: BlockFormat, features: int) -> np.ndarray:
    """The weight that the engine multiplies by: [out, features] f32."""
    codes = _unpack(quantized.codes, fmt.bits).astype(np.float32)
    if quantized.zero_points is None:
        zeros = np.full(codes.shape[:2], 1 << (fmt.bits - 1), np.float32)
    else:
        zeros = _unpack(quantized.zero_points, fmt.bits)[:, : codes.shape[1]].astype(np.float32)
    rows = (codes - zeros[..., None]) * quantized.scales[..., None]
    return rows.reshape(codes.shape[0], -1)[:, :features]


def _blocked(weight: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    rows, features = weight.shape
    padding = fmt.blocks(features) * fmt.block - features
    if padding:
        weight = np.pad(weight, ((0, 0), (0, padding)))
    return weight.astype(np.float32, copy=False).reshape(rows, -1, fmt.block)


def _symmetric(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitude, with its sign, lands on the lowest code, which reaches furthest."""
    low = 1 << (bits - 1)
    index = np.abs(blocks).argmax(-1)[..., None]
    extreme = np.take_along_axis(blocks, index, -1)[..., 0]
    scales = _nonzero(extreme / -low)
    return scales, np.full(scales.shape, low, np.float32)


def _even(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitude lands on the code that reaches as far in both directions."""
    low = 1 << (bits - 1)
    scales = _nonzero(np.abs(blocks).max(-1) / (low - 1))
    return scales, np.full(scales.shape, low, np.float32)


def _asymmetric(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The block's range, widened to hold 0, over all codes."""
    top = (1 << bits) - 1
    low = np.minimum(blocks.min(-1), 0.0)
    high = np.maximum(blocks.max(-1), 0.0)
    scales = _nonzero((high - low) / top)
    return scales, np.clip(np.rint(-low / scales), 0, top)


def _as_half(scales: np.ndarray) -> np.ndarray:
    most = np.finfo(np.float16).max
    return np.clip(scales, -most, most).astype(np.float16).astype(np.float32)


def _nonzero(scales: np.ndarray) -> np.ndarray:
    return np.where(scales == 0, 1.0, scales).astype(np.float32)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return codes
    return np.ascontiguousarray(codes[..., 0::2] | (codes[..., 1::2] << 4))


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return packed
    return np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    if bits == 4 and codes.shape[-1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return _pack(codes, bits)
