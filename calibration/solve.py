"""From a full-precision graph and texts to codes, some layers at a time.

All layers read what the full-precision model gives them. (The paper feeds each layer what the
rounded ones before it give; here no layer waits for another, and a finished one is kept.)
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from .block_quantization import QuantizedWeight, dequantize, quantize
from .collect import Calibration, collect, groups
from .gptq import gptq
from .sites import ReferenceGraph, Site
from .solved import SolvedWeights
from .statistics import Hessian

Array = NDArray[Any]


def solve(graph: ReferenceGraph, run: Calibration, solved: SolvedWeights) -> None:
    """Every layer but the head; those that `solved` has already are not solved again."""
    sites = [site for site in graph.sites if not site.is_head]
    solved.recall([site.weight for site in sites])
    missing = [site for site in sites if site.weight not in solved]
    for group in groups(missing, Hessian, run.most_bytes):
        found = collect(graph, group, Hessian, run)
        for i, site in enumerate(group, start=1):
            _solve_one(graph.weight(site), found[site.reads].matrix, site, solved)
            if i % 30 == 0 or i == len(group):
                run.tell(f"calibrating: {len(solved.names)} of {len(sites)} layers solved")


def _solve_one(weight: Array, hessian: Array, site: Site, solved: SolvedWeights) -> None:
    made = gptq(weight, hessian, solved.format)
    nearest = quantize(weight, solved.format)
    error = _error(weight, made, hessian, solved)
    solved.put(site.weight, made, error=error, nearest=_error(weight, nearest, hessian, solved))


def _error(
    weight: Array, quantized: QuantizedWeight, hessian: Array, solved: SolvedWeights
) -> float:
    """Squared error of the layer's output over the texts, relative to the output itself."""
    off = weight - dequantize(quantized, solved.format, weight.shape[1])
    whole = float(((weight @ hessian) * weight).sum())
    return float(((off @ hessian) * off).sum()) / whole if whole else 0.0
