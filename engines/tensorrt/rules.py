"""What a build fails on: each is a way in which an engine silently computes something else.

An input that the parser drops is a mask or a length that isn't obeyed; a cast to a wider type where
none was asked for undoes the precision; a plan larger than its weights holds them unpacked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from runtime.errors import BuildError

from .shape_inputs import CONTEXT_SLOTS, LOGIT_SLOTS

# Of these inputs only the shape is read, and TensorRT says so.
_SHAPES_ONLY = re.compile(rf"Input Tensor ({LOGIT_SLOTS}|{CONTEXT_SLOTS}) is unused or used only")
_UNUSED = re.compile(r"unused input|is unused", re.IGNORECASE)

PLAN_SLACK = 1.1  # of the weights' bytes: what an engine pads
PLAN_OVERHEAD_BYTES = 24 << 20  # kernels, and tables over the vocabulary in accept


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


def check_size(name: str, plan_bytes: int, weight_bytes: int) -> None:
    """Raises BuildError for a plan that holds more than its weights as they were quantized."""
    most = int(weight_bytes * PLAN_SLACK) + PLAN_OVERHEAD_BYTES
    if plan_bytes > most:
        raise BuildError(
            f"{name}: received a plan of {plan_bytes:,} bytes for weights of {weight_bytes:,}. "
            f"Expected at most {most:,}: the builder unpacked weights, or keeps them twice; choose "
            "another --precision, and please report this."
        )
