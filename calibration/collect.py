"""Statistics of what each layer reads, over texts, from the reference graph on ONNX Runtime's CPU.

A text is read from its beginning, some rows a call. What a call gives is summed up and let go. The
state is written down every now and then, and an interrupted run goes on behind the last text that
is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.contract import CacheSpec, target_graph
from runtime.errors import EngineError
from runtime.executor import EngineOptions, Executor

from .arrays import write_arrays
from .comparison.graphs import CHUNK, CachedGraph
from .sites import ReferenceGraph, Site, watched
from .statistics import Statistic

logger = logging.getLogger(__name__)

Array = NDArray[Any]
Kind = TypeVar("Kind", bound=Statistic)
MOST_BYTES = 1 << 30  # of statistics held at once; layers beyond it are read in another pass
SAVE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What is read, and where the state is kept. `tell` hears how far it is."""

    cache: CacheSpec
    vocab: int
    texts: Sequence[Sequence[int]]
    work: Path
    options: EngineOptions
    tell: Callable[[str], None] = lambda _: None
    save_s: float = SAVE_S
    most_bytes: int = MOST_BYTES
    divide: Mapping[str, Array] = field(default_factory=dict)  # by value: what its features are by


def groups(sites: Sequence[Site], kind: type[Statistic], most_bytes: int) -> list[list[Site]]:
    """Sites in the graph's order, as many together as their statistics may take."""
    found: list[list[Site]] = []
    held, seen = 0, set[str]()
    for site in sites:
        size = 0 if site.reads in seen else kind.size_bytes(site.features)
        if not found or held + size > most_bytes:
            found, held, seen = [*found, []], 0, set()
            size = kind.size_bytes(site.features)
        found[-1].append(site)
        held += size
        seen.add(site.reads)
    return found


def collect(
    graph: ReferenceGraph, sites: Sequence[Site], kind: type[Kind], run: Calibration
) -> dict[str, Kind]:
    """By the value that is read. Raises EngineError, naming the layer, where one isn't finite."""
    one_of = {site.reads: site for site in sites}
    state = _State.resume(run.work / f"{kind.__name__.lower()}.npz", one_of, kind)
    if state.done < len(run.texts):
        reader = _Reader(graph, list(one_of.values()), run)
        saved = perf_counter()
        for i, text in enumerate(run.texts[state.done :], start=state.done + 1):
            for rows in reader.read(text):
                for name, values in rows.items():
                    state.found[name].add(values)
            state.done = i
            if perf_counter() - saved > run.save_s or i == len(run.texts):
                state.save()
                saved = perf_counter()
                run.tell(f"calibrating: {i} of {len(run.texts)} texts read")
    return state.found


class _State(Generic[Kind]):
    """Statistics, and how many texts are in them."""

    def __init__(self, path: Path, found: dict[str, Kind], done: int) -> None:
        self.path, self.found, self.done = path, found, done

    @classmethod
    def resume(cls, path: Path, sites: dict[str, Site], kind: type[Kind]) -> _State[Kind]:
        """From the file, where it is of these sites; else empty."""
        empty = {name: kind.empty(site.features) for name, site in sites.items()}
        if not path.exists():
            return cls(path, empty, 0)
        try:
            with np.load(path) as arrays:
                if list(arrays["names"]) == list(sites):
                    parts = {n: _part(arrays, i) for i, n in enumerate(sites)}
                    done = int(arrays["done"])
                    return cls(path, {n: kind.of_state(s) for n, s in parts.items()}, done)
        except (OSError, ValueError, KeyError) as error:
            logger.warning("%s: starting anew: %s", path, error)
        return cls(path, empty, 0)

    def save(self) -> None:
        arrays: dict[str, Array] = {
            "names": np.array(list(self.found)),
            "done": np.array(self.done),
        }
        for i, statistic in enumerate(self.found.values()):
            arrays |= {f"{i}.{name}": array for name, array in statistic.state().items()}
        write_arrays(self.path, arrays)


def _part(arrays: Any, index: int) -> dict[str, Array]:
    prefix = f"{index}."
    return {n.removeprefix(prefix): arrays[n] for n in arrays.files if n.startswith(prefix)}


class _Reader:
    """Runs texts through the graph, and gives what the sites read."""

    def __init__(self, graph: ReferenceGraph, sites: Sequence[Site], run: Calibration) -> None:
        spec = target_graph(run.cache)
        spec = replace(spec, outputs=(*spec.outputs, *map(watched, sites)))
        self._sites = sites
        self._all_rows = any(site.is_head for site in sites)  # a head reads as many as it gives
        self._vocab, self._divide = run.vocab, run.divide
        path = graph.watching(sites)
        try:
            sizes = {"vocab": run.vocab}
            executor = Executor.load(path, spec, run.options)
            self._graph = CachedGraph(executor, spec, run.cache, sizes)
        finally:
            path.unlink()

    def read(self, text: Sequence[int]) -> Iterator[dict[str, Array]]:
        """For each call: value → rows [count, features]."""
        self._graph.length = 0
        for start in range(0, len(text), CHUNK):
            tokens = text[start : start + CHUNK]
            found = {
                site.reads: np.zeros((1, len(tokens), site.features), np.float32)
                for site in self._sites
            }
            count = len(tokens) if self._all_rows else 1
            logits = np.zeros((1, count, self._vocab), np.float32)
            rows = {"num_logits": np.array(count, np.int64)}
            self._graph.run(tokens, rows, {"logits": logits, **found})
            yield {name: self._finite(name, values[0]) for name, values in found.items()}

    def _finite(self, name: str, rows: Array) -> Array:
        if np.isfinite(rows).all():
            return rows / self._divide[name] if name in self._divide else rows
        layer = next(site.weight for site in self._sites if site.reads == name)
        raise EngineError(
            f"{layer}: received inputs that are not finite, in the checkpoint's own arithmetic. "
            "Expected finite activations; the checkpoint is damaged or overflows f32."
        )
