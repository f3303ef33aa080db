"""Where a model's drift comes from: the reference with one layer's rounded weights at a time.

The target's law is compared row by row, the draft's q step by step over its own vocabulary. KL of
that against the reference as it is says what this layer's rounding costs alone; the sum over layers
is near the drift of all where each is small.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import Bundle
from runtime.executor import EngineOptions
from runtime.manifest import ModelDraft

from .law import log_law
from .open_graph import Model, OpenGraph, OpenSession

logger = logging.getLogger(__name__)

Array = NDArray[Any]
Weights = Mapping[str, Array]
WORST = 10
DRAFT_TOKENS = 16
LEAST_Q = 1e-30  # a q of 0 in f32 has a logarithm all the same
OUTLIER_KL = 20.0  # times the median layer's: a layer that rounding hurts more than others
OUTLIER_ERROR = 5.0  # times the median layer's: no longer rounding as usual
MOVED = ("int4-awq",)  # precisions in which a layer's weights are scaled for its neighbours'
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

    def findings(self, model: str) -> list[str]:
        """A sentence on each layer that is far beyond the others."""
        if not self.layers:
            return []
        usual = float(np.median([layer.kl for layer in self.layers]))
        error = float(np.median([layer.weight_error for layer in self.layers]))
        far = [
            layer
            for layer in self.worst
            if layer.kl > LEAST_KL
            and (layer.kl > OUTLIER_KL * usual or layer.weight_error > OUTLIER_ERROR * error)
        ]
        return [
            f"{model} layer {layer.name}: its weights alone move the {model} by KL {layer.kl:.4f}, "
            f"where the median layer's do by {usual:.2g}; they differ from the reference's by "
            f"{layer.weight_error:.0%}."
            for layer in far
        ]


def target_layers(
    reference: Bundle, bundle: Bundle, tokens: Sequence[int], options: EngineOptions
) -> Layers:
    """Each layer of the target on `tokens`; none are measured where `tokens` is empty."""
    for side in (bundle, reference):
        if side.manifest.target.precision in MOVED:
            reason = f"{side.manifest.target.precision} moves factors from layer to layer"
            return Layers(tokens=0, layers=(), skipped=f"{reason}: none can be exchanged alone")
    pair = Model.target(bundle), Model.target(reference)
    return _layers(*pair, tokens, _Runner(laws=_target_laws, options=options))


def draft_layers(
    reference: Bundle, bundle: Bundle, tokens: Sequence[int], options: EngineOptions
) -> Layers:
    """The same of the draft, which is read a token a step, so on the last DRAFT_TOKENS of them."""
    if not all(isinstance(b.manifest.draft, ModelDraft) for b in (bundle, reference)):
        return Layers(
            tokens=0, layers=(), skipped="only a draft model's are measured, not a head's"
        )
    pair = Model.draft(bundle), Model.draft(reference)
    if pair[0].vocab != pair[1].vocab:
        return Layers(tokens=0, layers=(), skipped="the drafts have other vocabularies")
    return _layers(*pair, tokens[-DRAFT_TOKENS:], _Runner(laws=_draft_laws, options=options))


@dataclass(frozen=True, kw_only=True)
class _Runner:
    """laws: (session, vocab, tokens, weights) → log p [rows, vocab] f64."""

    laws: Callable[[OpenSession, int, Sequence[int], Weights], Array]
    options: EngineOptions


def _layers(ours: Model, theirs: Model, tokens: Sequence[int], runner: _Runner) -> Layers:
    if not tokens:
        return Layers(tokens=0, layers=(), skipped="--layer-tokens 0")
    try:
        graph, base = OpenGraph(ours), OpenGraph(theirs)
    except ModuleNotFoundError as error:
        return Layers(tokens=0, layers=(), skipped=f"{error}; pip install onnx")
    if graph.weights.keys() != base.weights.keys():
        odd = sorted(graph.weights.keys() ^ base.weights.keys())
        return Layers(tokens=0, layers=(), skipped=f"the graphs have other layers: {odd[:4]}")
    if not graph.weights:
        return Layers(tokens=0, layers=(), skipped="the graph has no linear layers")
    return Layers(tokens=len(tokens), layers=tuple(_measured(graph, base, tokens, runner)))


def _measured(
    graph: OpenGraph, base: OpenGraph, tokens: Sequence[int], runner: _Runner
) -> Iterator[Layer]:
    weights: dict[str, Array] = {name: layer.read() for name, layer in base.weights.items()}
    session, vocab = base.opened(runner.options), base.model.vocab
    usual = runner.laws(session, vocab, tokens, weights)
    for name, layer in graph.weights.items():
        rounded = layer.read()
        moved = runner.laws(session, vocab, tokens, {**weights, name: rounded})
        kl = float((np.exp(usual) * (usual - moved)).sum(-1).mean())
        error = np.linalg.norm(rounded - weights[name]) / np.linalg.norm(weights[name])
        yield Layer(name=short_name(name), group=_group(name), kl=kl, weight_error=float(error))


def _target_laws(
    session: OpenSession, vocab: int, tokens: Sequence[int], weights: Weights
) -> Array:
    logits = np.zeros((1, len(tokens), vocab), np.float32)
    values = {
        "input_ids": np.array([tokens], np.int64),
        "num_logits": np.array(len(tokens), np.int64),
    }
    session.run(weights, values, {"logits": logits})
    return log_law(logits[0])


def _draft_laws(session: OpenSession, vocab: int, tokens: Sequence[int], weights: Weights) -> Array:
    q = np.zeros((len(tokens), 1, 1, vocab), np.float32)
    for i, token in enumerate(tokens):
        values: dict[str, Array] = {
            "input_ids": np.array([[token]], np.int64),
            "past_lengths": np.array([i], np.int32),
            "temperature": np.ones(1, np.float32),
        }
        outputs = {"draft_token": np.zeros((1, 1), np.int64), "draft_step_probs": q[i]}
        session.run(weights, values, outputs)
    law: Array = np.log(q[:, 0, 0].astype(np.float64) + LEAST_Q)
    return law


def broken_layers(bundle: Bundle) -> list[str]:
    """Layers of the target whose weights hold NaN or infinity."""
    try:
        weights = OpenGraph(Model.target(bundle)).weights
    except ModuleNotFoundError:
        return []
    names = [name for name, layer in weights.items() if not np.isfinite(layer.read()).all()]
    return [short_name(name) for name in names]


def short_name(name: str) -> str:
    """a.b.q.weight+a.b.k.weight → a.b.q+k."""
    first, *others = name.replace(".weight", "").split("+")
    prefix = first.rpartition(".")[0]
    return "+".join([first, *(o.removeprefix(f"{prefix}.") for o in others)]).removeprefix("model.")


def _group(name: str) -> str:
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else "other"
