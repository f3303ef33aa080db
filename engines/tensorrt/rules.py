"""What a build fails on: each is a way in which an engine silently computes something else.

An input that the parser drops is a mask or a length that isn't obeyed; a cast to a wider type where
none was asked for undoes the precision; a plan larger than its weights holds them unpacked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.errors import BuildError

from .shape_inputs import CONTEXT_SLOTS, LOGIT_SLOTS

# Of these inputs only the shape is read, and TensorRT says so.
_SHAPES_ONLY = re.compile(rf"Input Tensor ({LOGIT_SLOTS}|{CONTEXT_SLOTS}) is unused or used only")
_UNUSED = re.compile(r"unused input|is unused", re.IGNORECASE)

PLAN_SLACK = 1.1  # of the weights' bytes: what an engine pads
PLAN_OVERHEAD_BYTES = 2 << 20  # the graph itself, and tables over the vocabulary in accept
# Kernels of a profile that a builder stores compiled, as TensorRT does. Not measured: needs a GPU.
BINARY_BYTES = 32 << 20

_TEXT = np.zeros(256, np.bool_)
_TEXT[32:127] = True
_TEXT[[9, 10, 13]] = True  # tab and line ends
_TEXT_BLOCK = 1024
_READ_BYTES = 64 << 20


def check_warnings(name: str, warnings: Sequence[str]) -> None:
    """Raises BuildError where an input isn't read."""
    bad = [w for w in warnings if _UNUSED.search(w) and not _SHAPES_ONLY.search(w)]
    if bad:
        raise BuildError(
            f"{name}: the builder warned: {bad[0]}. Expected every input to be read: what it drops "
            "would not be obeyed; please report the model with its config.json."
        )


def check_casts(name: str, network: Any, api: Any, meant: int) -> None:
    """Raises BuildError where the parsed network casts up more often than the graph says."""
    found = [layer for layer in _layers(network) if _widens(layer, api)]
    if len(found) > meant:
        raise BuildError(
            f"{name}: received {len(found)} casts from a narrow float to f32, "
            f"{', '.join(layer.name for layer in found[:3])} among them. Expected {meant}, of "
            "norms and the contract's outputs; the parser put a wider type in between."
        )


def _layers(network: Any) -> list[Any]:
    return [network.get_layer(i) for i in range(network.num_layers)]


def _widens(layer: Any, api: Any) -> bool:
    if layer.type != api.LayerType.CAST:
        return False
    narrow = (api.DataType.HALF, api.DataType.BF16)
    return layer.get_input(0).dtype in narrow and layer.get_output(0).dtype == api.DataType.FLOAT


def source_bytes(plan: np.ndarray) -> int:
    """How much of a plan (u8 bytes) is the text of kernels, in whole blocks of 1 KiB.

    TensorRT-RTX compiles its fused kernels where they run: a plan holds the source of each, 80 kB
    of common declarations included, once for every layer and profile. Weights are no text: 1,024
    bytes of them in a row that are all printable don't occur.
    """
    found = 0
    for first in range(0, len(plan), _READ_BYTES):
        part = plan[first : first + _READ_BYTES]
        whole = part[: len(part) // _TEXT_BLOCK * _TEXT_BLOCK].reshape(-1, _TEXT_BLOCK)
        found += int(_TEXT[whole].all(axis=1).sum()) * _TEXT_BLOCK
    return found


def check_size(name: str, plan: np.ndarray, weight_bytes: int, binary_bytes: int = 0) -> None:
    """plan: its bytes (u8); binary_bytes: what compiled kernels may take.

    Raises BuildError for a plan that holds more than its weights as they were quantized.
    """
    held = len(plan) - source_bytes(plan)
    most = int(weight_bytes * PLAN_SLACK) + PLAN_OVERHEAD_BYTES + binary_bytes
    if held > most:
        raise BuildError(
            f"{name}: received a plan that holds {held:,} bytes, the source of its kernels not "
            f"counted, for weights of {weight_bytes:,}. Expected at most {most:,}: the builder "
            "unpacked weights, or keeps them twice; choose another --precision, and please report "
            "this."
        )
