"""From a bundle's graphs to prebound rounds: opens the sessions and lays out the buffers."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from .accept import AcceptStep
from .branchers import load_brancher
from .buffers import RoundBuffers
from .contract import GraphSpec, accept_graph, target_graph
from .drafters import load_drafter, target_switches
from .errors import EngineError
from .executor import EngineOptions, Executor
from .features import FeatureStore
from .manifest import Manifest
from .provider_contract import PROVIDER_BACKEND
from .round import Rounds
from .steps import Steps
from .target import PREFILL_CHUNK, TargetStep


def load_rounds(
    path: Path, manifest: Manifest, options: EngineOptions, graphs: Graphs | None = None
) -> Rounds:
    """Open the bundle's graphs for one sequence at a time; graphs: None opens them here."""
    graphs = graphs or open_graphs(path, manifest)
    card, vocab = manifest.target, manifest.target.vocab_size
    sizes = {"vocab": vocab, "draft_vocab": manifest.draft_vocab_size}
    limits = manifest.limits
    buffers = RoundBuffers(
        limits.max_draft_tokens, vocab, manifest.draft_vocab_size, limits.max_tree_nodes
    )
    width = manifest.feature_width
    fixed = {"vocab": vocab, **({"feature_width": width} if width else {})}
    spec = target_graph(card.cache, target_switches(manifest.draft))
    executor = _open(graphs, "target", spec, options, fixed)
    target = TargetStep(executor, card.cache, buffers, _features(manifest))
    # Accept reads one row but for a few values: a worker would cost more than it does.
    accept = _open(graphs, "accept", accept_graph(), replace(options, threads=1), sizes)
    drafter = brancher = None
    if manifest.draft:
        open_graph = partial(_open, graphs, options=options, sizes={**sizes, **fixed})
        drafter = load_drafter(manifest.draft, open_graph, buffers, target, path)
        if limits.max_tree_nodes:
            brancher = load_brancher(manifest.draft, drafter, open_graph)
    steps = Steps(
        buffers=buffers,
        target=target,
        drafter=drafter,
        accept=AcceptStep(accept, buffers),
        brancher=brancher,
    )
    rounds = graphs.rounds(steps)
    weakref.finalize(rounds, graphs.close)  # what holds a device lets it go with its last rounds
    return rounds


def _features(manifest: Manifest) -> FeatureStore | None:
    """Room for the target's hidden states, where the drafter reads them."""
    if not manifest.feature_width:
        return None
    limits = manifest.limits
    most_rows = max(PREFILL_CHUNK, limits.max_draft_tokens + 1, limits.max_tree_nodes + 1)
    return FeatureStore(manifest.feature_width, manifest.limits.max_context, most_rows)


class Graphs(Protocol):
    """Where a bundle's graphs are opened: what comes is an executor, or behaves like one."""

    suffix: str  # of the files, for errors

    def open(self, name: str, spec: GraphSpec, options: EngineOptions) -> Executor: ...
    def rounds(self, steps: Steps) -> Rounds: ...
    def upload(self, array: NDArray[Any]) -> None:
        """To where sessions read it; for measurements, as `download`."""

    def download(self, array: NDArray[Any]) -> None: ...
    def close(self) -> None: ...


class _OnnxGraphs:
    suffix = "onnx"

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str, spec: GraphSpec, options: EngineOptions) -> Executor:
        return Executor.load(self._path / "onnx" / f"{name}.onnx", spec, options)

    def rounds(self, steps: Steps) -> Rounds:
        return Rounds(steps)

    def upload(self, array: NDArray[Any]) -> None:
        """Sessions read the host's memory."""

    def download(self, array: NDArray[Any]) -> None:
        """And write it."""

    def close(self) -> None:
        """A session goes with its executor."""


def open_graphs(path: Path, manifest: Manifest) -> Graphs:
    """Raises BundleError and EngineError for engines that this machine can't run."""
    if manifest.backend == PROVIDER_BACKEND:
        from .provider.graphs import ProviderGraphs

        return ProviderGraphs(path, manifest)
    if manifest.engines is None:
        return _OnnxGraphs(path)
    from .cuda.graphs import EngineGraphs  # only where there is a GPU to use

    return EngineGraphs(path, manifest)


def _open(
    graphs: Graphs, name: str, spec: GraphSpec, options: EngineOptions, sizes: dict[str, int]
) -> Executor:
    """Open one graph and compare the sizes that it fixes with the manifest's."""
    executor = graphs.open(name, spec, options)
    for axis, size in sizes.items():
        if executor.axes.get(axis, size) != size:
            raise EngineError(
                f"{name}.{graphs.suffix}: {axis}: received {executor.axes[axis]}. Expected {size}, "
                "as the manifest says; rebuild the bundle."
            )
    return executor
