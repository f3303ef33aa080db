"""From a full-precision graph and texts to codes, some layers at a time: by GPTQ or by AWQ.

All layers read what the full-precision model gives them. (The paper feeds each layer what the
rounded ones before it give; here no layer waits for another, and a finished one is kept.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .awq import cut, factors, output_error
from .block_quantization import QuantizedWeight, dequantize, quantize
from .collect import Calibration, collect, groups
from .folds import Fold, find_folds
from .gptq import gptq
from .sites import ReferenceGraph, Site
from .solved import SolvedWeights
from .statistics import Hessian

Array = NDArray[Any]


class Solver(Enum):
    """How codes are chosen."""

    GPTQ = "gptq"
    AWQ = "awq"


def solve(graph: ReferenceGraph, run: Calibration, solved: SolvedWeights) -> None:
    """Every layer but the head, by GPTQ; those that `solved` has already are not solved again."""
    for site, hessian in _missing(graph, run, solved):
        weight = graph.weight(site)
        made = gptq(weight, hessian, solved.format)
        _put(solved, site, weight, hessian, dequantize(made, solved.format, site.features), made)


def solve_scaled(
    graph: ReferenceGraph,
    run: Calibration,
    solved: SolvedWeights,
    is_stored: Callable[[str], bool],  # whether a vector is the checkpoint's own
) -> None:
    """The same by AWQ. Layers that read one value share its factors, whichever is solved first."""
    assert solved.factors is not None  # of such a recipe
    folds = find_folds(graph, is_stored)
    readers: dict[str, list[Site]] = {}
    for site in graph.sites:
        if not site.is_head:
            readers.setdefault(site.reads, []).append(site)
    for site, hessian in _missing(graph, run, solved):
        weight = graph.weight(site)
        sharing = readers[site.reads]
        s = _known(solved, sharing)
        if s is None:
            s = _factors(graph, sharing, hessian, folds.get(site.reads), solved)
        made = cut(weight * s, hessian / np.outer(s, s), solved.format)
        rounded = dequantize(made, solved.format, site.features) / s
        _put(solved, site, weight, hessian, rounded, made, s)
    sites = [site for group in readers.values() for site in group]
    solved.factors.features.update({site.weight: solved.features(site.weight) for site in sites})
    reads = {site.weight: site.reads for site in sites}
    solved.factors.put(folds, reads, {site.weight: site.rows for site in sites})


def _known(solved: SolvedWeights, sharing: list[Site]) -> Array | None:
    done = next((site.weight for site in sharing if site.weight in solved), None)
    return None if done is None else solved.features(done)


def _factors(
    graph: ReferenceGraph,
    sharing: list[Site],
    hessian: Array,
    fold: Fold | None,
    solved: SolvedWeights,
) -> Array:
    if fold is None:
        return np.ones(len(hessian), np.float32)
    return factors([graph.weight(site) for site in sharing], hessian, fold, solved.format)


def _missing(
    graph: ReferenceGraph, run: Calibration, solved: SolvedWeights
) -> Iterator[tuple[Site, Array]]:
    """Sites still to be solved, with XᵀX of what they read."""
    sites = [site for site in graph.sites if not site.is_head]
    solved.recall([site.weight for site in sites])
    missing = [site for site in sites if site.weight not in solved]
    for group in groups(missing, Hessian, run.most_bytes):
        found = collect(graph, group, Hessian, run)
        for i, site in enumerate(group, start=1):
            yield site, found[site.reads].matrix
            if i % 30 == 0 or i == len(group):
                run.tell(f"calibrating: {len(solved.names)} of {len(sites)} layers solved")


def _put(
    solved: SolvedWeights,
    site: Site,
    weight: Array,
    hessian: Array,
    rounded: Array,  # what the layer multiplies by, factors undone
    made: QuantizedWeight,
    features: Array | None = None,
) -> None:
    nearest = dequantize(quantize(weight, solved.format), solved.format, site.features)
    whole = output_error(weight, np.zeros_like(weight), hessian) or 1.0
    errors = [output_error(weight, one, hessian) / whole for one in (rounded, nearest)]
    solved.put(site.weight, made, error=errors[0], nearest=errors[1], features=features)
