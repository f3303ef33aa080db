"""What a build checks on the graphs that it wrote, before they may become a bundle.

Parity asks whether the graph computes the model: it is compared with the eager model *carrying the
same rounded weights*, so that a wrong operator isn't excused by quantization. How far rounding
moved the target from its checkpoint is drift, a measurement: recorded beside it, never judged here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from runtime.errors import GateFailed
from runtime.manifest import Gate

from .checkpoint import find_name
from .exact_graph import exact_arithmetic as exact_arithmetic
from .gate_graph import GateGraph
from .memory import available_bytes as available_bytes
from .tolerances import EAGER, ENGINE, ROWS

logger = logging.getLogger(__name__)

Array = np.ndarray
Figures = dict[str, float | int | str]


class Rounding(Protocol):
    """What a precision does to a weight [out, in], called `name` in the checkpoint; its own name is
    the tolerances' key."""

    @property
    def name(self) -> str: ...
    def rounded(self, weight: Array, name: str = "") -> Array: ...


def relative_error(a: Array, b: Array) -> float:
    """|a - b| / |b - mean(b)|: 0 is equal, 1 is unrelated."""
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b - b.mean())), 1e-30)


def _softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(-1, keepdims=True), dtype=np.float64)
    return shifted / shifted.sum(-1, keepdims=True)


def drift(reference: Array, built: Array) -> dict[str, float]:
    """KL(reference ‖ built) and top-1 agreement of logits [rows, vocab]."""
    p, q = _softmax(reference), _softmax(built)
    kl = (p * (np.log(p + 1e-30) - np.log(q + 1e-30))).sum(-1)
    agree = (reference.argmax(-1) == built.argmax(-1)).mean()
    return {"drift_kl": float(kl.mean()), "drift_top1_agreement": float(agree)}


def parity(
    name: str,
    run_exact: Callable[[], Array],
    run_engine: Callable[[], Array],
    load_eager: Callable[[], PreTrainedModel],
    tokens: Sequence[int],
    precision: Rounding,
    rounded: frozenset[str],
    *,
    needs_bytes: int,
) -> Gate:
    """The graph in f32 arithmetic on `tokens` against the eager model with the same weights; and
    the drift of the engine's from the checkpoint as it was, which is measured, not judged.

    run_exact, run_engine: logits or probabilities [len(tokens), vocab]. Skipped, with the reason,
    where the eager model doesn't fit into memory. Raises GateFailed.
    """
    free = available_bytes()
    if needs_bytes > free:
        return Gate(name=name, status="skipped", reason=_too_big(needs_bytes, free))
    model = load_eager()
    reference = _eager_logits(model, tokens)
    round_weights(model, precision, rounded)
    same_weights = _eager_logits(model, tokens) if rounded else reference
    del model
    exact, built = _as_logits(run_exact()), _as_logits(run_engine())
    width = exact.shape[1]  # less than the model's, where a draft is padded beyond its target
    reference, same_weights = reference[:, :width], same_weights[:, :width]
    error = relative_error(_centred(exact), _centred(same_weights))
    figures: Figures = {"relative_error": error, "limit": EAGER, "rows": len(tokens)}
    figures |= drift(reference, built)
    if not error <= EAGER:
        raise GateFailed(
            f"gate {name}: received a relative error of {error:.3g} against the eager model with "
            f"the same weights. Expected at most {EAGER:g}; this model isn't exported rightly: "
            "please report it with its config.json."
        )
    return Gate(name=name, status="passed", figures=figures)


def features_parity(
    exact: GateGraph,
    load_eager: Callable[[], PreTrainedModel],
    tokens: Sequence[int],
    taps: Sequence[int],
    precision: Rounding,
    rounded: frozenset[str],
    *,
    needs_bytes: int,
) -> Gate:
    """The hidden states that a drafter reads, in f32 arithmetic, each against the eager model's.

    A head that reads the states of a neighbouring layer still gives a law, of no use at all.
    Skipped, with the reason, where the eager model doesn't fit into memory. Raises GateFailed.
    """
    free = available_bytes()
    if needs_bytes > free:
        return Gate(name="features", status="skipped", reason=_too_big(needs_bytes, free))
    model = load_eager()
    round_weights(model, precision, rounded)
    expected = _eager_states(model, tokens, taps)
    exact.reset()
    exact.rows(tokens)
    received = np.split(exact.features, len(taps), axis=1)
    errors = [relative_error(a, b) for a, b in zip(received, expected, strict=True)]
    figures: Figures = {"relative_error": max(errors), "limit": EAGER, "rows": len(tokens)}
    if not max(errors) <= EAGER:
        worst = int(np.argmax(errors))
        raise GateFailed(
            f"gate features: state {taps[worst]}: received a relative error of "
            f"{errors[worst]:.3g} against the eager model with the same weights. Expected at most "
            f"{EAGER:g}; this model isn't exported rightly: please report it with its config.json."
        )
    return Gate(name="features", status="passed", figures=figures)


@torch.inference_mode()
def _eager_states(
    model: PreTrainedModel, tokens: Sequence[int], taps: Sequence[int]
) -> list[Array]:
    """[len(tokens), H] each."""
    out = model(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
    return [out.hidden_states[tap][0].float().numpy() for tap in taps]


def _as_logits(rows: Array) -> Array:
    """Probabilities (the draft's q) as logarithms, logits as they are."""
    is_law = rows.min() >= 0 and np.allclose(rows.sum(-1), 1, atol=1e-3)
    return np.log(rows + np.float32(1e-30)) if is_law else rows


def _centred(rows: Array) -> Array:
    """Logits less each row's logarithm of the normaliser: what q determines."""
    rows = rows.astype(np.float64)
    peak = rows.max(-1, keepdims=True)
    return rows - peak - np.log(np.exp(rows - peak).sum(-1, keepdims=True))


@torch.inference_mode()
def _eager_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Array:
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float().numpy()


def round_weights(model: PreTrainedModel, precision: Rounding, names: frozenset[str]) -> None:
    """Replace the named parameters of an eager model by what the engine multiplies with.

    A tied parameter of which one name stays as it is gets untied. `name.T` is a parameter that the
    engine holds transposed: its blocks run along the other axis.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen: dict[torch.nn.Parameter, set[str]] = {}
    known: dict[torch.nn.Parameter, str] = {}  # as the graph calls it
    prefix = f"{model.base_model_prefix}."
    turned = {n.removesuffix(".T") for n in names if n.endswith(".T")}
    for stored in (n.removesuffix(".T") for n in names):
        name = find_name(stored, parameters, prefix) or stored
        chosen.setdefault(parameters[name], set()).add(name)
        known[parameters[name]] = stored
    for parameter, its_names in chosen.items():
        is_turned = not turned.isdisjoint(its_names)
        weight = parameter.numpy().T if is_turned else parameter.numpy()
        made = precision.rounded(np.ascontiguousarray(weight), known[parameter])
        rounded = torch.from_numpy(np.ascontiguousarray(made.T if is_turned else made))
        if its_names == {name for name, other in parameters.items() if other is parameter}:
            parameter.data = rounded
        else:
            _untie(model, its_names, torch.nn.Parameter(rounded, requires_grad=False))


def _untie(model: PreTrainedModel, names: set[str], parameter: torch.nn.Parameter) -> None:
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)


def _too_big(needed: int, free: int) -> str:
    return f"the eager model needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


def rows_at_once(graph: GateGraph, tokens: Sequence[int], k: int) -> Gate:
    """k + 1 rows in one pass, followed by rows that don't count, against one row a pass.

    Where the likeliest token differs, its top-2 margin must be within the numeric noise. `graph`
    is in f32 arithmetic. Raises GateFailed.
    """
    single, at_once, padded = _three_ways(graph, list(tokens), k)
    error, padding = relative_error(at_once, single), relative_error(padded, at_once)
    noise, margin = float(np.abs(at_once - single).max()), _first_flip_margin(at_once, single)
    figures: Figures = {
        "relative_error": error,
        "relative_error_padded": padding,
        "limit": ROWS,
        "noise": noise,
        "first_flip_margin": margin,
    }
    if not max(error, padding) <= ROWS or margin > 2 * noise:
        raise GateFailed(
            f"gate rows: {k + 1} rows at once differ from row by row: {figures}. Expected errors "
            "within the limit, and a top-2 margin within twice the noise where the likeliest token "
            "first differs; please report the model with its config.json."
        )
    return Gate(name="rows", status="passed", figures=figures)


def _three_ways(graph: GateGraph, tokens: list[int], k: int) -> tuple[Array, Array, Array]:
    """Logits [k + 1, vocab] of the last k + 1 tokens: row by row, at once, at once and padded."""
    head, block = tokens[: -(k + 1)], tokens[-(k + 1) :]
    graph.reset()
    graph.rows(head)
    single = np.concatenate([graph.rows([t]) for t in block])
    graph.length = len(head)
    at_once = graph.rows(block)
    graph.length = len(head)
    padded = graph.rows([*block, *reversed(block)])[: k + 1]
    return single, at_once, padded


def engine_noise(
    engine: GateGraph, exact: GateGraph, tokens: Sequence[int], k: int, precision: Rounding
) -> Gate:
    """The graph as the engine runs it against itself in f32 arithmetic; and how far its own rows
    differ with how many are run at once, which is what can turn a greedy choice. Raises GateFailed.
    """
    single, at_once, _ = _three_ways(engine, list(tokens), k)
    engine.reset()
    exact.reset()
    error = relative_error(engine.rows(tokens), exact.rows(tokens))
    limit = ENGINE[precision.name]
    figures: Figures = {
        "relative_error": error,
        "limit": limit,
        "rows_relative_error": relative_error(at_once, single),
        "rows_noise": float(np.abs(at_once - single).max()),
        "first_flip_margin": _first_flip_margin(at_once, single),
    }
    if not error <= limit:
        raise GateFailed(
            f"gate engine: received a relative error of {error:.3g} against the same graph in f32 "
            f"arithmetic. Expected at most {limit:g}; the engine's kernels are wrong on this "
            "processor, or this model doesn't bear rounded activations: use --precision fp32."
        )
    return Gate(name="engine", status="passed", figures=figures)


def _first_flip_margin(a: Array, b: Array) -> float:
    """b's top-2 margin where a's likeliest token first differs; 0 if it never does."""
    for row_a, row_b in zip(a, b, strict=True):
        if row_a.argmax() != row_b.argmax():
            second, first = np.partition(row_b, -2)[-2:]
            return float(first - second)
    return 0.0


def rollback(graph: GateGraph, tokens: Sequence[int], k: int) -> Gate:
    """Verify, roll back, replay: bit-equal to a run that never took the wrong path.

    Raises GateFailed.
    """
    tokens = list(tokens)
    head, block = tokens[: -(k + 1)], tokens[-(k + 1) :]
    graph.reset()
    graph.rows(head)
    clean = graph.rows(block)
    graph.reset()
    graph.rows(head)
    graph.rows([(t + 7) % 50 for t in [*block, *block]])  # another path, and longer
    graph.length = len(head)
    replayed = graph.rows(block)
    if not np.array_equal(clean, replayed):
        raise GateFailed(
            "gate rollback: the logits after a rollback differ from a clean run's by "
            f"{np.abs(clean - replayed).max():.3g}. Expected equal bits: rows beyond the length "
            "are read."
        )
    return Gate(name="rollback", status="passed", figures={"rows": len(block)})
