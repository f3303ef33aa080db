"""Contract tensors as ONNX values: graphs built through these cannot misspell a name or axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from runtime.contract import TensorSpec


def typed(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[ir.DataType, ir.Shape]:
    """A contract tensor's type and shape, with the axes that are fixed at build time filled in."""
    axes = [sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in spec.axes]
    return ir.DataType.from_numpy(np.dtype(spec.dtype)), ir.Shape(axes)


def name_outputs(
    values: Sequence[ir.Value], specs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> None:
    """Give computed values the names and types that the contract states."""
    for value, spec in zip(values, specs, strict=True):
        value.name = spec.name
        value.dtype, value.shape = typed(spec, sizes)
