"""Where a model's drift comes from: the reference with one layer's rounded weights at a time.

The target's law is compared row by row, the draft's q step by step over its own vocabulary. KL of
that against the reference as it is says what this layer's rounding costs alone; the sum over layers
is near the drift of all where each is small.

Where a recipe moved factors between the weights of a decoder layer (AWQ), none of them means
anything without the others: such layers are exchanged whole, with their norms.
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
from .model import Model
from .open_graph import OpenGraph
from .open_session import OpenSession

logger = logging.getLogger(__name__)

Array = NDArray[Any]
Weights = Mapping[str, Array]
WORST = 10
DRAFT_TOKENS = 16
LEAST_Q = 1e-30  # a q of 0 in f32 has a logarithm all the same
OUTLIER_KL = 20.0  # times the median layer's: a layer that rounding hurts more than others
OUTLIER_ERROR = 5.0  # times the median layer's: no longer rounding as usual
MOVED = ("int4-awq",)  # precisions in which a weight is scaled for others of its decoder layer
LEAST_KL = 0.01  # nats a token: below, a layer does nothing worth naming


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear weight, or one decoder layer, of the bundle in the reference's place of it."""

    name: str
    group: str  # "0", "1", … of the decoder, or "other": embedding and head
    kl: float  # nats a token
    weight_error: float | None  # |w − w_reference| / |w_reference| of one weight


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
        errors = [one.weight_error for one in self.layers if one.weight_error is not None]
        error = float(np.median(errors)) if errors else 0.0
        far = [
            layer
            for layer in self.worst
            if layer.kl > LEAST_KL
            and (
                layer.kl > OUTLIER_KL * usual or (layer.weight_error or 0.0) > OUTLIER_ERROR * error
            )
        ]
        return [
            f"{model} layer {layer.name}: its weights alone move the {model} by KL {layer.kl:.4f}, "
            f"where the median layer's do by {usual:.2g}{_differing(layer)}."
            for layer in far
        ]


def _differing(layer: Layer) -> str:
    if layer.weight_error is None:
        return ""
    return f"; they differ from the reference's by {layer.weight_error:.0%}"


def target_layers(
    reference: Bundle, bundle: Bundle, tokens: Sequence[int], options: EngineOptions
) -> Layers:
    """Each layer of the target on `tokens`; none are measured where `tokens` is empty."""
    moved = any(side.manifest.target.precision in MOVED for side in (bundle, reference))
    pair = Model.target(bundle), Model.target(reference)
    return _layers(
        *pair, tokens, _Runner(laws=_target_laws, options=options), _whole if moved else _single
    )


def draft_layers(
    reference: Bundle, bundle: Bundle, tokens: Sequence[int], options: EngineOptions
) -> Layers:
    """The same of the draft, which is read a token a step, so on the last DRAFT_TOKENS of them."""
    if not all(isinstance(b.manifest.draft, ModelDraft) for b in (bundle, reference)):
        return Layers(
            tokens=0,
            layers=(),
            skipped="they are measured where both sides draft with a model of its own",
        )
    pair = Model.draft(bundle), Model.draft(reference)
    if pair[0].vocab != pair[1].vocab:
        return Layers(tokens=0, layers=(), skipped="the drafts have other vocabularies")
    runner = _Runner(laws=_draft_laws, options=options)
    return _layers(*pair, tokens[-DRAFT_TOKENS:], runner, _single)


@dataclass(frozen=True, kw_only=True)
class _Runner:
    """laws: (session, vocab, tokens, weights) → log p [rows, vocab] f64."""

    laws: Callable[[OpenSession, int, Sequence[int], Weights], Array]
    options: EngineOptions


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """What is exchanged at once: weights, and with a whole decoder layer its vectors."""

    name: str
    group: str
    weights: tuple[str, ...]
    vectors: tuple[str, ...] = ()

    def read(self, graph: OpenGraph) -> dict[str, Array]:
        values = {name: graph.weights[name].read() for name in self.weights}
        return values | {name: graph.vectors[name].read() for name in self.vectors}


Units = Callable[[OpenGraph], list[_Unit]]


def _single(graph: OpenGraph) -> list[_Unit]:
    """Every weight by itself."""
    return [_alone(name) for name in graph.weights]


def _alone(name: str) -> _Unit:
    return _Unit(name=short_name(name), group=_group(name), weights=(name,))


def _whole(graph: OpenGraph) -> list[_Unit]:
    """Every decoder layer; what is in none by itself."""
    parts: dict[str, list[str]] = {}
    for name in graph.weights:
        parts.setdefault(_place(name) or name, []).append(name)
    return [
        _Unit(
            name=place.removeprefix("model."),
            group=_group(names[0]),
            weights=tuple(names),
            vectors=tuple(name for name in graph.vectors if _place(name) == place),
        )
        if _place(names[0])
        else _alone(place)
        for place, names in parts.items()
    ]


def _layers(
    ours: Model, theirs: Model, tokens: Sequence[int], runner: _Runner, units: Units
) -> Layers:
    if not tokens:
        return Layers(tokens=0, layers=(), skipped="--layer-tokens 0")
    try:
        graph, base = OpenGraph(ours), OpenGraph(theirs)
    except ModuleNotFoundError as error:
        return Layers(tokens=0, layers=(), skipped=f"{error}; pip install onnx")
    found, theirs_found = units(graph), units(base)
    odd = sorted(one.name for one in {*found} ^ {*theirs_found})
    if odd:
        return Layers(tokens=0, layers=(), skipped=f"the graphs have other layers: {odd[:4]}")
    if not found:
        return Layers(tokens=0, layers=(), skipped="the graph has no linear layers")
    layers = tuple(_measured(graph, base, found, tokens, runner))
    return Layers(tokens=len(tokens), layers=layers)


def _measured(
    graph: OpenGraph,
    base: OpenGraph,
    units: Sequence[_Unit],
    tokens: Sequence[int],
    runner: _Runner,
) -> Iterator[Layer]:
    weights: dict[str, Array] = {}
    for unit in units:
        weights |= unit.read(base)
    vectors = [name for unit in units for name in unit.vectors]
    session, vocab = base.opened(runner.options, vectors), base.model.vocab
    usual = runner.laws(session, vocab, tokens, weights)
    for unit in units:
        rounded = unit.read(graph)
        moved = runner.laws(session, vocab, tokens, {**weights, **rounded})
        kl = float((np.exp(usual) * (usual - moved)).sum(-1).mean())
        error = _error(rounded, weights) if len(rounded) == 1 else None
        yield Layer(name=unit.name, group=unit.group, kl=kl, weight_error=error)


def _error(rounded: Weights, weights: Weights) -> float:
    """Of the one weight in `rounded`."""
    ((name, values),) = rounded.items()
    return float(np.linalg.norm(values - weights[name]) / np.linalg.norm(weights[name]))


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


def _place(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight → model.layers.3; "" for what is in no decoder layer."""
    found = re.match(r"[^+]*?\.\d+(?=\.)", name)
    return found[0] if found else ""
