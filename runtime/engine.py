"""From a bundle's graphs to prebound rounds: opens the sessions and lays out the buffers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from .accept import AcceptStep
from .branchers import load_brancher
from .buffers import RoundBuffers
from .contract import GraphSpec, accept_graph, target_graph
from .drafters import load_drafter, target_switches
from .errors import EngineError
from .executor import EngineOptions, Executor
from .features import FeatureStore
from .manifest import Manifest
from .round import Rounds
from .target import PREFILL_CHUNK, TargetStep


def load_rounds(path: Path, manifest: Manifest, options: EngineOptions) -> Rounds:
    """Open the graphs below `path`/onnx for one sequence at a time."""
    card, vocab = manifest.target, manifest.target.vocab_size
    sizes = {"vocab": vocab, "draft_vocab": manifest.draft_vocab_size}
    limits = manifest.limits
    buffers = RoundBuffers(
        limits.max_draft_tokens, vocab, manifest.draft_vocab_size, limits.max_tree_nodes
    )
    width = manifest.feature_width
    fixed = {"vocab": vocab, **({"feature_width": width} if width else {})}
    spec = target_graph(card.cache, target_switches(manifest.draft))
    executor = _open(path, "target", spec, options, fixed)
    target = TargetStep(executor, card.cache, buffers, _features(manifest))
    # Accept reads one row but for a few values: a worker would cost more than it does.
    accept = _open(path, "accept", accept_graph(), replace(options, threads=1), sizes)
    drafter = brancher = None
    if manifest.draft:
        open_graph = partial(_open, path, options=options, sizes={**sizes, **fixed})
        drafter = load_drafter(manifest.draft, open_graph, buffers, target, path)
        if limits.max_tree_nodes:
            brancher = load_brancher(manifest.draft, drafter, open_graph)
    return Rounds(buffers, target, drafter, AcceptStep(accept, buffers), brancher)


def _features(manifest: Manifest) -> FeatureStore | None:
    """Room for the target's hidden states, where the drafter reads them."""
    if not manifest.feature_width:
        return None
    limits = manifest.limits
    most_rows = max(PREFILL_CHUNK, limits.max_draft_tokens + 1, limits.max_tree_nodes + 1)
    return FeatureStore(manifest.feature_width, manifest.limits.max_context, most_rows)


def _open(
    path: Path, name: str, spec: GraphSpec, options: EngineOptions, sizes: dict[str, int]
) -> Executor:
    """Open one graph and compare the sizes that it fixes with the manifest's."""
    executor = Executor.load(path / "onnx" / f"{name}.onnx", spec, options)
    for axis, size in sizes.items():
        if executor.axes.get(axis, size) != size:
            raise EngineError(
                f"{name}.onnx: {axis}: received {executor.axes[axis]}. Expected {size}, as the "
                "manifest says; rebuild the bundle."
            )
    return executor
