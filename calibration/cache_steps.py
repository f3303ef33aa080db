"""How far each feature of keys and values reaches, read off the reference's own caches.

After a text has been read, its keys and values lie in the caches as attention sees them, RoPE
included: the largest magnitude of each feature over all texts is the largest number that 8 bits
hold. The state is written down after every text; an interrupted run goes on behind it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.contract import target_graph
from runtime.errors import EngineError
from runtime.executor import Executor

from .arrays import write_arrays
from .collect import Calibration
from .comparison.graphs import CHUNK, CachedGraph
from .sites import ReferenceGraph

logger = logging.getLogger(__name__)

Array = NDArray[Any]
TOP = 127.0
TOLD_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class CacheSteps:
    """Steps by the cache's name, [kv_heads · head_dim] f32; kept in a file."""

    path: Path
    found: dict[str, Array] = field(default_factory=dict)

    def of(self, layer: int) -> tuple[Array, Array]:
        """Of keys and values."""
        name = f"past_key_values.{layer}"
        return self.found[f"{name}.key"], self.found[f"{name}.value"]

    def put(self, most: dict[str, Array]) -> None:
        """From the largest magnitudes. A feature that is always 0 has a step of 1."""
        steps = {n: np.where(m == 0, 1.0, m / TOP).astype(np.float32) for n, m in most.items()}
        write_arrays(self.path, steps)
        self.found.update(steps)

    def recall(self) -> None:
        with np.load(self.path) as arrays:
            self.found.update({name: arrays[name] for name in arrays.files})


def cache_reach(graph: ReferenceGraph, run: Calibration) -> dict[str, Array]:
    """Largest magnitudes by cache: [kv_heads · head_dim] f32.

    Raises EngineError, naming the layer, where one isn't finite.
    """
    path = run.work / "caches.npz"
    most, done = _resumed(path, run)
    if done == len(run.texts):
        return most
    spec, sizes = target_graph(run.cache), {"vocab": run.vocab}
    executor = Executor.load(graph.path, spec, run.options)
    reader = CachedGraph(executor, spec, run.cache, sizes)
    for i, text in enumerate(run.texts[done:], start=done + 1):
        _read(reader, text, run.vocab)
        for name, cache in reader.caches().items():
            most[name] = np.maximum(most[name], _magnitudes(name, cache[0, :, : len(text)]))
        write_arrays(path, {**most, "done": np.array(i)})
        if i % TOLD_EVERY == 0 or i == len(run.texts):
            run.tell(f"calibrating: caches of {i} of {len(run.texts)} texts read")
    return most


def _resumed(path: Path, run: Calibration) -> tuple[dict[str, Array], int]:
    width = run.cache.kv_heads * run.cache.head_dim
    names = [one.name for one in run.cache.past()]
    try:
        with np.load(path) as arrays:
            return {name: arrays[name] for name in names}, int(arrays["done"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError) as error:
        logger.warning("%s: starting anew: %s", path, error)
    return {name: np.zeros(width, np.float32) for name in names}, 0


def _read(reader: CachedGraph, text: Any, vocab: int) -> None:
    reader.length = 0
    one = {"num_logits": np.array(1, np.int64)}
    for start in range(0, len(text), CHUNK):
        logits = np.zeros((1, 1, vocab), np.float32)
        reader.run(text[start : start + CHUNK], one, {"logits": logits})


def _magnitudes(name: str, rows: Array) -> Array:
    """[kv_heads, rows, head_dim] → [kv_heads · head_dim]"""
    if not np.isfinite(rows).all():
        _, layer, part = name.split(".")
        raise EngineError(
            f"layer {layer}: received a cache of {part}s that is not finite, in the checkpoint's "
            "own arithmetic. Expected finite activations; the checkpoint is damaged or overflows "
            "f32."
        )
    most: Array = np.abs(rows).max(1).reshape(-1)
    return most
