"""Codes that spare the features that inputs are large in: AWQ (Lin et al. 2023, arXiv 2306.00978).

Before rounding, the weights of a feature are multiplied by s = m^α and its inputs divided by it,
where m is how large they usually are: what a large input meets is then rounded finely, at the cost
of the others in its block. α is the one of a grid whose rounded layer has the least error on text
(the paper's eq. 5), and blocks are then cut off where that serves the output better (its section
4.1). Errors are those of the layer's output, (w − ŵ) H (w − ŵ)ᵀ with H = XᵀX, so no input is kept.

m is the root of the mean square, which H has; the paper takes the mean magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .block_quantization import BlockFormat, QuantizedWeight, dequantize, quantize, round_to, steps
from .folds import Fold

Array = NDArray[Any]
EXPONENTS = tuple(i / 20 for i in range(20))
CUTS = tuple(1 - i / 40 for i in range(1, 20))  # of a block's range, down to about a half


def factors(
    weights: Sequence[Array],  # [out, in] f32 each, all of what reads one value
    hessian: Array,  # [in, in]
    fold: Fold,
    fmt: BlockFormat,
) -> Array:
    """s [in] f32 with the least error over all of them; never worse than 1 everywhere."""
    usual = fold.shared(np.sqrt(np.maximum(hessian.diagonal(), 0)))
    candidates = [fold.spread(_power(usual, exponent)) for exponent in EXPONENTS]
    errors = [sum(_scaled_error(w, s, hessian, fmt) for w in weights) for s in candidates]
    return candidates[int(np.argmin(errors))]


def cut(weight: Array, hessian: Array, fmt: BlockFormat) -> QuantizedWeight:
    """`weight` in `fmt`, each block over the part of its range that costs its output least.

    A block is judged by itself; where that makes the whole worse, nothing is cut off.
    """
    whole = quantize(weight, fmt)
    blocks = _diagonal_blocks(hessian, fmt)
    best, least = np.ones(whole.scales.shape, np.float32), _block_errors(weight, 1.0, blocks, fmt)
    for part in CUTS:
        errors = _block_errors(weight, part, blocks, fmt)
        best, least = np.where(errors < least, part, best), np.minimum(errors, least)
    made = round_to(weight, *steps(weight, fmt, best.astype(np.float32)), fmt)
    features = weight.shape[1]
    errors_of_both = [
        output_error(weight, dequantize(one, fmt, features), hessian) for one in (made, whole)
    ]
    return made if errors_of_both[0] < errors_of_both[1] else whole


def output_error(weight: Array, rounded: Array, hessian: Array) -> float:
    """Squared, summed over all texts."""
    off = weight - rounded
    return float(((off @ hessian) * off).sum(dtype=np.float64))


def _power(usual: Array, exponent: float) -> Array:
    """Features that are always 0 keep a factor of 1; the others' are centred about it."""
    used = usual > 0
    if not used.any():
        return np.ones(usual.shape, np.float32)
    powers = np.where(used, np.where(used, usual, 1.0) ** exponent, 1.0)
    centre = np.sqrt(powers[used].max() * powers[used].min())
    return np.where(used, powers / centre, 1.0).astype(np.float32)


def _scaled_error(weight: Array, s: Array, hessian: Array, fmt: BlockFormat) -> float:
    rounded = dequantize(quantize(weight * s, fmt), fmt, weight.shape[1]) / s
    return output_error(weight, rounded, hessian)


def _diagonal_blocks(hessian: Array, fmt: BlockFormat) -> Array:
    """[blocks, block, block], padded with 0."""
    features = len(hessian)
    count = fmt.blocks(features)
    padded = np.zeros((count * fmt.block,) * 2, np.float32)
    padded[:features, :features] = hessian
    parts = padded.reshape(count, fmt.block, count, fmt.block)
    each = np.arange(count)
    return np.ascontiguousarray(parts[each, :, each])


def _block_errors(weight: Array, part: float, hessians: Array, fmt: BlockFormat) -> Array:
    """[out, blocks]"""
    rows, features = weight.shape
    made = round_to(weight, *steps(weight, fmt, np.float32(part)), fmt)
    off = np.zeros((rows, len(hessians) * fmt.block), np.float32)
    off[:, :features] = weight - dequantize(made, fmt, features)
    blocks = off.reshape(rows, -1, fmt.block).transpose(1, 0, 2)  # [blocks, out, block]
    errors: Array = ((blocks @ hessians) * blocks).sum(-1).T
    return errors
