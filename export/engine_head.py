"""A head that drafts from the target's states, on its way into engines, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.tensorrt.ranges import Profile
from runtime.errors import GateFailed
from runtime.manifest import Gate

from .draft_plan import States, WrittenDraft
from .engine_precision import EnginePrecision
from .gates import relative_error
from .tolerances import ENGINE

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class PlanOrder:
    """An engine to build from the graph at `path`."""

    name: str
    path: Path
    profiles: tuple[Profile, ...]


@dataclass(frozen=True, kw_only=True)
class EngineHead:
    """written: what of it is in the bundle when its engines are. The others take tokens of a text
    and the target's states.

    law: q at temperature 1 behind all of them but the first: [n - 1, D] f32; None where no graph
    in f32 was written.
    """

    written: WrittenDraft
    orders: tuple[PlanOrder, ...]
    gates: Callable[[Sequence[int], States], list[Gate]]
    law: Callable[[Sequence[int], States], Array | None]


def typed_gate(typed: Callable[[], Array], exact: Array, precision: EnginePrecision) -> Gate:
    """The strongly typed graphs against themselves in f32 arithmetic. Raises GateFailed."""
    name = "draft engine"
    if precision.missing_on_cpu is not None:
        reason = f"ONNX Runtime's CPU has no kernels for {precision.missing_on_cpu}"
        return Gate(name=name, status="skipped", reason=reason)
    error, limit = relative_error(typed(), exact), ENGINE[precision.name]
    if not error <= limit:
        raise GateFailed(
            f"gate {name}: received a relative error of {error:.3g} against the same graphs in f32 "
            f"arithmetic. Expected at most {limit:g}; this head doesn't bear fp16 activations: use "
            "--draft-precision bf16, or --draft-backend onnxruntime."
        )
    figures: dict[str, float | int | str] = {"relative_error": error, "limit": limit}
    return Gate(name=name, status="passed", figures=figures)


def unchecked(needed_bytes: int) -> Gate:
    """Of a head whose eager model, or whose target's, doesn't fit into memory."""
    reason = f"the eager models need {needed_bytes / 1e9:.1f} GB of memory, more than is free"
    return Gate(name="draft parity", status="skipped", reason=reason)
