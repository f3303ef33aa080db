"""From a bundle's graphs to prebound rounds: opens the sessions and lays out the buffers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from .accept import AcceptStep
from .buffers import RoundBuffers
from .contract import GraphSpec, accept_graph, target_graph
from .drafters import load_drafter
from .errors import EngineError
from .executor import EngineOptions, Executor
from .manifest import Manifest
from .round import Rounds
from .target import TargetStep


def load_rounds(path: Path, manifest: Manifest, options: EngineOptions) -> Rounds:
    """Open the graphs below `path`/onnx for one sequence at a time."""
    card, vocab = manifest.target, manifest.target.vocab_size
    sizes = {"vocab": vocab, "draft_vocab": manifest.draft_vocab_size}
    buffers = RoundBuffers(manifest.limits.max_draft_tokens, vocab, manifest.draft_vocab_size)
    target = _open(path, "target", target_graph(card.cache), options, {"vocab": vocab})
    # Accept reads one row but for a few values: a worker would cost more than it does.
    accept = _open(path, "accept", accept_graph(), replace(options, threads=1), sizes)
    drafter = None
    if manifest.draft:
        open_graph = partial(_open, path, options=options, sizes=sizes)
        drafter = load_drafter(manifest.draft, open_graph, buffers, path)
    return Rounds(
        buffers,
        TargetStep(target, card.cache, buffers),
        drafter,
        AcceptStep(accept, buffers),
    )


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
