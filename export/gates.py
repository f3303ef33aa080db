"""What a build checks on the graphs that it wrote, before they may become a bundle.

Parity asks whether the graph computes the model: it is compared with the eager model *carrying the
same rounded weights*, so that a wrong operator isn't excused by quantization. How far rounding moved
the target from its checkpoint is drift, a measurement: recorded beside it, never a pass mark here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from runtime.contract import CacheSpec
from runtime.errors import GateFailed
from runtime.manifest import Gate

from .gate_graph import DraftGateGraph, GateGraph
from .precision import Precision
from .tolerances import TOLERANCES

logger = logging.getLogger(__name__)

Array = np.ndarray


def relative_error(a: Array, b: Array) -> float:
    """|a - b| / |b - mean(b)|: 0 is equal, 1 is unrelated."""
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b - b.mean()), 1e-30))


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
    run: Callable[[], Array],
    load_eager: Callable[[], PreTrainedModel],
    tokens: Sequence[int],
    precision: Precision,
    rounded: frozenset[str],
    *,
    needs_bytes: int,
) -> Gate:
    """The graph's logits or log-probabilities on `tokens` against the eager model's.

    run: gives [len(tokens), vocab] of the graph. Skipped, with the reason, where the eager model
    doesn't fit into memory. Raises GateFailed.
    """
    free = available_bytes()
    if needs_bytes > free:
        return Gate(
            name=name,
            status="skipped",
            reason=f"the eager model needs {needs_bytes / 1e9:.1f} GB of memory, "
            f"{free / 1e9:.1f} GB are free",
        )
    model = load_eager()
    reference = _eager_logits(model, tokens)
    round_weights(model, precision, rounded)
    same_weights = _eager_logits(model, tokens) if rounded else reference
    del model
    built = run()
    if built.min() >= 0:  # a law rather than logits: compare logarithms up to a constant
        built = np.log(built + 1e-30)
        same_weights = np.log(_softmax(same_weights) + 1e-30)
    error = relative_error(built, same_weights)
    limit = TOLERANCES[precision.name].eager
    figures = {"relative_error": error, "limit": limit, "rows": len(tokens)}
    figures |= drift(reference, built)
    if not error <= limit:
        raise GateFailed(
            f"gate {name}: received a relative error of {error:.3g} against the eager model with "
            f"the same weights. Expected at most {limit:g} ({TOLERANCES[precision.name].reason}); "
            "this model isn't exported rightly: please report it with its config.json."
        )
    return Gate(name=name, status="passed", figures=figures)


@torch.inference_mode()
def _eager_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Array:
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float().numpy()


def round_weights(model: PreTrainedModel, precision: Precision, names: frozenset[str]) -> None:
    """Replace the named parameters of an eager model by what the engine multiplies with."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    done: set[int] = set()
    for name in sorted(names):
        parameter = parameters[name]
        if parameter.data_ptr() in done:
            continue
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(precision.rounded(parameter.numpy())))
        done.add(parameter.data_ptr())


def available_bytes() -> int:
    """Memory that can be taken without swapping, as the kernel estimates it."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def rows_at_once(graph: GateGraph, tokens: Sequence[int], k: int, precision: Precision) -> Gate:
    """k + 1 rows in one pass, followed by rows that don't count, against one row a pass.

    Where the likeliest token differs, its top-2 margin must be within the numeric noise.
    Raises GateFailed.
    """
    tokens = list(tokens)
    head, block = tokens[: -(k + 1)], tokens[-(k + 1) :]
    graph.reset()
    graph.rows(head)
    single = np.concatenate([graph.rows([t]) for t in block])
    graph.length = len(head)
    at_once = graph.rows(block)
    graph.length = len(head)
    padded = graph.rows([*block, *reversed(block)])[: k + 1]
    limit = TOLERANCES[precision.name].rows
    errors = {
        "relative_error": relative_error(at_once, single),
        "relative_error_padded": relative_error(padded, at_once),
    }
    margin = _first_flip_margin(at_once, single)
    noise = float(np.abs(at_once - single).max())
    if max(errors.values()) > limit or margin > 2 * noise:
        raise GateFailed(
            f"gate rows: {k + 1} rows at once differ from row by row: {errors}, top-2 margin "
            f"{margin:.3g} where the likeliest token first differs. Expected errors of at most "
            f"{limit:g} and a margin within twice the noise of {noise:.3g}."
        )
    return Gate(
        name="rows",
        status="passed",
        figures={**errors, "limit": limit, "noise": noise, "first_flip_margin": margin},
    )


def _first_flip_margin(a: Array, b: Array) -> float:
    """b's margin between its two likeliest where a's likeliest first differs; 0 if it never does."""
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


def check_target(
    path: Path,
    cache: CacheSpec,
    vocab_size: int,
    tokens: Sequence[int],
    k: int,
    precision: Precision,
) -> tuple[Gate, Gate, Callable[[], Array]]:
    """The gates that need the graph alone, and the run that parity needs."""
    graph = GateGraph(path, cache, vocab_size)

    def run() -> Array:
        graph.reset()
        half = len(tokens) // 2
        return np.concatenate([graph.rows(tokens[:half]), graph.rows(tokens[half:])])

    return rows_at_once(graph, tokens, k, precision), rollback(graph, tokens, k), run


def draft_run(
    path: Path, cache: CacheSpec, vocab_size: int, tokens: Sequence[int]
) -> Callable[[], Array]:
    return lambda: DraftGateGraph(path, cache, vocab_size).probs(tokens)
