"""Where a target's drift comes from: the reference with one layer's rounded weights at a time.

KL of that against the reference as it is says what this layer's rounding costs alone; the sum over
layers is near the drift of all where each is small.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import Bundle
from runtime.executor import EngineOptions

from .law import log_law
from .open_graph import OpenGraph

logger = logging.getLogger(__name__)

Array = NDArray[Any]
WORST = 10
OUTLIER = 20.0  # times the median layer: no longer rounding as usual
LEAST_KL = 0.01  # nats a token: below, a layer does nothing worth naming


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear weight of the bundle in the reference's place of it."""

    name: str
    group: str  # "0", "1", … of the decoder, or "other": embedding and head
    kl: float  # nats a token
    weight_error: float  # |w − w_reference| / |w_reference|


@dataclass(frozen=True, kw_only=True)
class Layers:
    """All of them, in the graph's order, or why there are none."""

    tokens: int
    layers: tuple[Layer, ...]
    skipped: str = ""

    @property
    def worst(self) -> list[Layer]:
        """The ten that cost most."""
        ranked = sorted(self.layers, key=lambda layer: -layer.kl)
        return [layer for layer in ranked[:WORST] if layer.kl > 0]

    def findings(self) -> list[str]:
        """A sentence on each layer that is far beyond the others."""
        if not self.layers:
            return []
        usual = float(np.median([layer.kl for layer in self.layers]))
        far = [w for w in self.worst if w.kl > max(OUTLIER * usual, LEAST_KL)]
        return [
            f"layer {layer.name}: its weights alone move the target by KL {layer.kl:.4f}, where "
            f"the median layer's do by {usual:.2g}; they differ from the reference's by "
            f"{layer.weight_error:.0%}."
            for layer in far
        ]


def layer_drift(
    reference: Bundle, bundle: Bundle, tokens: Sequence[int], options: EngineOptions
) -> Layers:
    """Measure each layer on `tokens`; none are measured where `tokens` is empty."""
    if not tokens:
        return Layers(tokens=0, layers=(), skipped="--layer-tokens 0")
    try:
        ours, theirs = OpenGraph(bundle), OpenGraph(reference)
    except ModuleNotFoundError as error:
        return Layers(tokens=0, layers=(), skipped=f"{error}; pip install onnx")
    if ours.weights.keys() != theirs.weights.keys():
        odd = sorted(ours.weights.keys() ^ theirs.weights.keys())
        return Layers(tokens=0, layers=(), skipped=f"the graphs have other layers: {odd[:4]}")
    if not ours.weights:
        return Layers(tokens=0, layers=(), skipped="the target's graph has no linear layers")
    return Layers(tokens=len(tokens), layers=tuple(_measured(ours, theirs, tokens, options)))


def broken_layers(bundle: Bundle) -> list[str]:
    """Layers of the target whose weights hold NaN or infinity."""
    try:
        weights = OpenGraph(bundle).weights
    except ModuleNotFoundError:
        return []
    names = [name for name, layer in weights.items() if not np.isfinite(layer.read()).all()]
    return [short_name(name) for name in names]


def _measured(
    ours: OpenGraph, theirs: OpenGraph, tokens: Sequence[int], options: EngineOptions
) -> Iterator[Layer]:
    weights = {name: layer.read() for name, layer in theirs.weights.items()}
    session = theirs.opened(options)
    usual = log_law(session.logits(list(tokens), weights))
    for name, layer in ours.weights.items():
        rounded = layer.read()
        moved = log_law(session.logits(list(tokens), {**weights, name: rounded}))
        kl = float((np.exp(usual) * (usual - moved)).sum(-1).mean())
        error = np.linalg.norm(rounded - weights[name]) / np.linalg.norm(weights[name])
        yield Layer(name=short_name(name), group=_group(name), kl=kl, weight_error=float(error))


def short_name(name: str) -> str:
    """a.b.q.weight+a.b.k.weight → a.b.q+k."""
    first, *others = (part.removesuffix(".weight") for part in name.split("+"))
    prefix = first.rpartition(".")[0]
    return "+".join([first, *(o.removeprefix(f"{prefix}.") for o in others)]).removeprefix("model.")


def _group(name: str) -> str:
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else "other"
