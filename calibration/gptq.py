"""Codes that make good each other's errors: GPTQ (Frantar et al. 2022, arXiv 2210.17323).

Rounding to nearest treats each weight alone. What counts is the layer's output, whose squared error
is (w − ŵ) H (w − ŵ)ᵀ with H = XᵀX over calibration text: so after one input feature is rounded, the
features still to come are moved by what makes up for its error best, and are rounded then.

Blocks keep the scales that rounding to nearest gives them; features are taken in the order of
their diagonal in H, the heaviest first, while others can still make up for it (act-order).

Written here and not taken from a library: onnxruntime's own `GPTQ` option holds the model and all
activations in memory, and the packages that have it otherwise are torch programs for whole models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .block_quantization import BlockFormat, QuantizedWeight, packed, steps

DAMPING = 0.01  # of H's mean diagonal, added to it: the paper's
LAZY = 64  # features whose errors are carried on together (the paper's section 4, step 2)


def gptq(
    weight: np.ndarray,  # [out, in] f32
    hessian: np.ndarray,  # [in, in], XᵀX of what the layer reads
    fmt: BlockFormat,
    *,
    damping: float = DAMPING,
) -> QuantizedWeight:
    """`weight` in `fmt`, with the least error on inputs like those of `hessian`.

    A feature that never was anything but 0 is rounded to nearest. H need not have full rank:
    damping gives it that, and with little text the result goes towards rounding to nearest.
    """
    scales, zeros = steps(weight, fmt)
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    grid = _Grid.of(scales, zeros, fmt, order)
    ordered = np.ascontiguousarray(weight[:, order], np.float32)
    codes = _solve(ordered, _carrying(hessian[np.ix_(order, order)], damping), grid)
    rows, features = weight.shape
    whole = np.zeros((rows, fmt.blocks(features) * fmt.block), np.float32)
    whole[:] = np.repeat(zeros, fmt.block, axis=1)  # what pads the last block stands for 0
    whole[:, order] = codes
    return packed(whole.reshape(rows, -1, fmt.block), scales, zeros, fmt)


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """What each feature, in the order that they are taken in, can be rounded to."""

    scales: np.ndarray  # [out, in]
    zeros: np.ndarray  # [out, in]
    bottom: int
    top: int

    @classmethod
    def of(
        cls, scales: np.ndarray, zeros: np.ndarray, fmt: BlockFormat, order: np.ndarray
    ) -> _Grid:
        block = order // fmt.block
        return cls(scales=scales[:, block], zeros=zeros[:, block], bottom=fmt.bottom, top=fmt.top)

    def codes(self, column: np.ndarray, at: int) -> np.ndarray:
        rounded = np.rint(column / self.scales[:, at]) + self.zeros[:, at]
        return np.clip(rounded, self.bottom, self.top)

    def values(self, codes: np.ndarray, at: int) -> np.ndarray:
        return (codes - self.zeros[:, at]) * self.scales[:, at]


def _carrying(hessian: np.ndarray, damping: float) -> np.ndarray:
    """Upper triangle U with UᵀU = H⁻¹: row i says how feature i's error is spread."""
    damped = hessian.astype(np.float64)
    diagonal = damped.diagonal().copy()
    unused = diagonal == 0
    scale = float(diagonal.mean()) or 1.0
    damped[np.diag_indices_from(damped)] += damping * scale + unused * scale
    inverse = np.linalg.inv(damped)
    lower = np.linalg.cholesky(inverse)
    return np.ascontiguousarray(lower.T, np.float32)


def _solve(weight: np.ndarray, carry: np.ndarray, grid: _Grid) -> np.ndarray:
    """Algorithm 1: codes [out, in] of `weight`, which is used up."""
    codes = np.empty_like(weight)
    features = weight.shape[1]
    for start in range(0, features, LAZY):
        end = min(start + LAZY, features)
        part, local = weight[:, start:end], carry[start:end, start:end]
        errors = np.empty_like(part)
        for i in range(end - start):
            column = codes[:, start + i] = grid.codes(part[:, i], start + i)
            errors[:, i] = (part[:, i] - grid.values(column, start + i)) / local[i, i]
            part[:, i + 1 :] -= np.outer(errors[:, i], local[i, i + 1 :])
        weight[:, end:] -= errors @ carry[start:end, end:]
    return codes
