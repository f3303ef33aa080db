"""From a bundle's graphs to prebound rounds: opens the sessions and lays out the buffers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .accept import AcceptStep
from .buffers import RoundBuffers
from .contract import GraphSpec, accept_graph, draft_graph, target_graph
from .draft_model import DraftModel
from .errors import EngineError
from .executor import EngineOptions, Executor
from .manifest import Manifest
from .round import Rounds
from .target import TargetStep


def load_rounds(path: Path, manifest: Manifest, options: EngineOptions) -> Rounds:
    """Open `onnx/{target,draft,accept}.onnx` below `path` for one sequence at a time."""
    target_card, draft_card = manifest.target, manifest.draft
    vocab = target_card.vocab_size
    draft_vocab = draft_card.vocab_size if draft_card else vocab
    buffers = RoundBuffers(manifest.limits.max_draft_tokens, vocab, draft_vocab)
    target = _open(path, "target", target_graph(target_card.cache), options, {"vocab": vocab})
    sizes = {"vocab": vocab, "draft_vocab": draft_vocab}
    # Accept reads one row but for a few values: a worker would cost more than it does.
    accept = _open(path, "accept", accept_graph(), replace(options, threads=1), sizes)
    drafter = None
    if draft_card:
        spec = draft_graph(draft_card.cache)
        executor = _open(path, "draft", spec, options, sizes)
        drafter = DraftModel(executor, draft_card.cache, buffers)
    return Rounds(
        buffers,
        TargetStep(target, target_card.cache, buffers),
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
