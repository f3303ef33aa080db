"""One scale for what each layer reads, from ranges over text; and how it is smoothed before.

No scale serves an input whose few largest values reach far beyond all others: its layer is left
out. On SmolLM2-135M-Instruct that is nine of 120, all `down_proj`, whose output's error would be up
to 0.45 of it (a first token makes 3,000 where 99.9 % lie below 20), in the others 0.05.

SmoothQuant (Xiao et al. 2022, arXiv 2211.10438, eq. 4): a feature whose inputs reach far is divided
by s = max|x|^α / max|w|^(1 − α), and its weights are multiplied by it. Features whose inputs are
always 0 keep s = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import write_arrays
from .collect import Calibration, collect
from .sites import TURNED, ReferenceGraph, Site
from .statistics import BINS, Ranges

Array = NDArray[Any]

ALPHA = 0.5  # the paper's
PERCENTILE = 99.99
CANDIDATES = 64  # ends that the least squared error is looked for among
USUAL = 99.9  # percent of a layer's inputs, which `reach` is held against


class RangeRule(Enum):
    """Where a layer's inputs are cut off."""

    ABSMAX = "absmax"
    PERCENTILE = "percentile"
    MSE = "mse"


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """scale: of a step; smoothing: [features] f32 or None."""

    scale: float
    smoothing: Array | None


def smoothing(inputs: Array, weights: Array, alpha: float = ALPHA) -> Array:
    """s from the largest magnitudes of each feature's inputs and weights: [features] f32."""
    usable = (inputs > 0) & (weights > 0)
    ratio = np.where(usable, inputs, 1.0) ** alpha / np.where(usable, weights, 1.0) ** (1 - alpha)
    return ratio.astype(np.float32)


def input_scale(ranges: Ranges, top: float, rule: RangeRule) -> float:
    """Of one step, where `top` is the largest number; 1 for a layer that only ever reads 0."""
    if not ranges.limit:
        return 1.0
    match rule:
        case RangeRule.ABSMAX:
            end = float(ranges.most.max())
        case RangeRule.PERCENTILE:
            end = _percentile(ranges)
        case RangeRule.MSE:
            end = _least_error(ranges, top)
    return end / top


def reach(ranges: Ranges) -> float:
    """How many times the largest input is what all but a few are below; 1 for nothing but 0."""
    if not ranges.limit:
        return 1.0
    return float(ranges.most.max()) / _percentile(ranges, USUAL)


def _percentile(ranges: Ranges, percent: float = PERCENTILE) -> float:
    """The upper edge of the bin that holds it; never beyond the largest value."""
    reached = np.cumsum(ranges.counts) / ranges.counts.sum()
    index = int(np.searchsorted(reached, percent / 100))
    return min(float(ranges.most.max()), (index + 1) * ranges.limit / BINS)


def _least_error(ranges: Ranges, top: float) -> float:
    """The end with the least squared error: rounding's within it, cutting off beyond it."""
    most = float(ranges.most.max())
    centres = (np.arange(BINS) + 0.5) * ranges.limit / BINS
    ends = most * np.arange(1, CANDIDATES + 1) / CANDIDATES
    errors = [_error(centres, ranges.counts, end, end / top) for end in ends]
    return float(ends[int(np.argmin(errors))])


def _error(values: Array, counts: Array, end: float, step: float) -> float:
    beyond = np.maximum(values - end, 0)
    each = np.where(beyond > 0, beyond**2, step**2 / 12)
    return float((each * counts).sum())


@dataclass(frozen=True, kw_only=True)
class InputScales:
    """Of the layers of one graph, by weight; kept in a file."""

    path: Path
    found: dict[str, LayerInput] = field(default_factory=dict)

    def of(self, name: str) -> LayerInput | None:
        """Of a weight, by itself or among those that a graph joins, perhaps turned."""
        first = name.split("+")[0]
        known = {first, first + TURNED}
        return next((one for n, one in self.found.items() if known & set(n.split("+"))), None)

    def put(self, found: dict[str, LayerInput]) -> None:
        arrays: dict[str, Array] = {"names": np.array(list(found))}
        for i, one in enumerate(found.values()):
            smooth = np.zeros(0, np.float32) if one.smoothing is None else one.smoothing
            arrays |= {f"{i}.scale": np.array(one.scale), f"{i}.smoothing": smooth}
        write_arrays(self.path, arrays)
        self.found.update(found)

    def recall(self) -> None:
        """Take over what the file has."""
        with np.load(self.path) as arrays:
            for i, name in enumerate(arrays["names"]):
                smooth = arrays[f"{i}.smoothing"]
                scale = float(arrays[f"{i}.scale"])
                one = LayerInput(scale=scale, smoothing=smooth if smooth.size else None)
                self.found[str(name)] = one


def find_scales(
    graph: ReferenceGraph,
    run: Calibration,
    *,
    top: float,
    rule: RangeRule,
    smooth: bool,
    most_reach: float = math.inf,
) -> dict[str, LayerInput]:
    """Every layer but the head and those whose inputs have more `reach`.

    Texts are read once, and once more where inputs are smoothed.
    """
    sites = [site for site in graph.sites if not site.is_head]
    ranges = collect(graph, sites, Ranges, run)
    smoothed: dict[str, Array] = {}
    if smooth:
        most = _weight_reach(graph, sites)
        smoothed = {n: smoothing(ranges[n].most, most[n]) for n in ranges}
        again = replace(run, work=run.work / "smoothed", divide=smoothed)
        ranges = collect(graph, sites, Ranges, again)
    by_value = {
        name: LayerInput(
            scale=input_scale(found, top, rule), smoothing=smoothed[name] if smooth else None
        )
        for name, found in ranges.items()
        if reach(found) <= most_reach
    }
    return {site.weight: by_value[site.reads] for site in sites if site.reads in by_value}


def _weight_reach(graph: ReferenceGraph, sites: Iterable[Site]) -> dict[str, Array]:
    """Largest magnitude by feature, over all weights that read one value."""
    found: dict[str, Array] = {}
    for site in sites:
        most = np.abs(graph.weight(site)).max(0)
        found[site.reads] = np.maximum(found.get(site.reads, 0), most)
    return found
