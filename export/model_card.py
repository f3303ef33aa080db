"""What the manifest says of a model that was built from a checkpoint."""

from __future__ import annotations

from runtime.manifest import ModelCard

from .checkpoint import Checkpoint
from .gates import Rounding
from .graphs import WrittenGraph


def model_card(checkpoint: Checkpoint, graph: WrittenGraph, precision: Rounding) -> ModelCard:
    return ModelCard(
        name=checkpoint.name,
        model_type=checkpoint.config.model_type,
        revision=checkpoint.revision,
        sha256=checkpoint.sha256(),
        parameters=checkpoint.parameters,
        precision=precision.name,
        vocab_size=graph.vocab_size,
        cache=graph.cache,
    )
