"""Outrider's runtime: speculative tokens from a compiled bundle.

The leaf of the package set: it imports numpy, onnxruntime, tokenizers and jinja2, each when it is
first needed, and never torch, transformers, onnx or the packages that build bundles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    BuildError,
    BundleError,
    CheckpointError,
    EngineError,
    GateFailed,
    InvalidRequest,
    LimitExceeded,
    OutriderError,
    UnsupportedModel,
    VocabularyMismatch,
)
from .grammar import Grammar
from .sampling import SamplingParams

if TYPE_CHECKING:
    from .bundle import Bundle
    from .decoder import Decoder, Result
    from .generation import Chunk
    from .sequence import FinishReason
    from .stats import Stats
    from .tree import Tree
    from .tree_shape import DynamicTree, StaticTree, parse_tree

__all__ = [
    "BuildError",
    "Bundle",
    "BundleError",
    "CheckpointError",
    "Chunk",
    "Decoder",
    "DynamicTree",
    "EngineError",
    "FinishReason",
    "GateFailed",
    "Grammar",
    "InvalidRequest",
    "LimitExceeded",
    "OutriderError",
    "Result",
    "SamplingParams",
    "StaticTree",
    "Stats",
    "Tree",
    "UnsupportedModel",
    "VocabularyMismatch",
    "parse_tree",
]

_LAZY = {
    "Bundle": "bundle",
    "Chunk": "generation",
    "Decoder": "decoder",
    "DynamicTree": "tree_shape",
    "FinishReason": "sequence",
    "Result": "decoder",
    "StaticTree": "tree_shape",
    "Stats": "stats",
    "Tree": "tree",
    "parse_tree": "tree_shape",
}


def __getattr__(name: str) -> Any:
    """Import the decoder's modules, and NumPy with them, only when one is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
