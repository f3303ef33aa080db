"""Does a written head compute what the eager head does, from the target's states and on its own?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.errors import GateFailed
from runtime.manifest import Gate

from . import gates
from .eagle_head import EagleHead
from .eagle_module import eager_fuse, eager_module
from .eagle_rows import OWN_STEPS, log_law, true_pairs
from .tolerances import EAGER

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """How the graphs hold the weights of the layer and of what joins the target's states, and which
    of them, by their canonical names, were rounded."""

    layer: gates.Rounding
    fuse: gates.Rounding
    rounded: frozenset[str]


def head_parity(
    head: EagleHead,
    weights: HeadWeights,
    run: Callable[[], Array],
    tokens: list[int],
    features: Array,  # [len(tokens), feature_width] of the target at these tokens
) -> Gate:
    """The graphs in f32 arithmetic against the eager head with the same rounded weights.

    run: their `export.eagle_rows.graph_rows`; the last OWN_STEPS are the head's own steps, each
    from the state that it gave before. Skipped, with the reason, where the eager head doesn't fit
    into memory. Raises GateFailed.
    """
    free, needed = gates.available_bytes(), eager_bytes(head)
    if needed > free:
        reason = (
            f"the eager head needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
        )
        return Gate(name="draft parity", status="skipped", reason=reason)
    graph, eager = run(), _eager_rows(head, weights, tokens, features)
    width = graph.shape[1]  # the target's ids alone are drawn
    error = gates.relative_error(*(laws(rows, width) for rows in (graph, eager)))
    figures: gates.Figures = {
        "relative_error": error,
        "limit": EAGER,
        "rows": len(graph),
        "own_steps": OWN_STEPS,
    }
    if not error <= EAGER:
        raise GateFailed(
            f"gate draft parity: received a relative error of {error:.3g} against the eager head "
            f"with the same weights. Expected at most {EAGER:g}; this head isn't exported rightly: "
            "please report it with its config.json."
        )
    return Gate(name="draft parity", status="passed", figures=figures)


def eager_bytes(head: EagleHead) -> int:
    return 4 * sum(int(np.prod(shape)) for shape in head.shapes().values())


def laws(rows: Array, width: int) -> Array:
    """Logarithms of a law's rows, centred."""
    rows = rows[:, :width].astype(np.float64)
    return rows - rows.mean(-1, keepdims=True)


@torch.inference_mode()
def _eager_rows(
    head: EagleHead, weights: HeadWeights, tokens: Sequence[int], features: Array
) -> Array:
    """log q of the row of the last true pair and of each own step: [1 + OWN_STEPS, D]."""
    module = eager_module(head)
    states = torch.from_numpy(np.array(features[None, : true_pairs(tokens)]))
    if head.version == 3:
        fuse = eager_fuse(head)
        _round(fuse, weights.fuse, weights.rounded)
        states = fuse(states)
    _round(module, weights.layer, weights.rounded)
    found = []
    for _ in range(1 + OWN_STEPS):
        count = states.shape[1]
        ids = torch.tensor([list(tokens[1 : 1 + count])])
        logits, own = module(ids, states, torch.arange(count)[None])
        found.append(log_law(torch.softmax(logits[0, 0], -1).numpy()))
        states = torch.cat([states, own[:, -1:]], dim=1)
    return np.stack(found)


def _round(module: torch.nn.Module, rounding: gates.Rounding, names: frozenset[str]) -> None:
    for name, parameter in module.named_parameters():
        if name in names:
            parameter.copy_(torch.from_numpy(rounding.rounded(parameter.numpy(), name)))
