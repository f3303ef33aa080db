"""Medusa heads beside their target: each drafts one token further from one hidden state.

    open_medusa("path/or/hub-id", target) → MedusaHeads

With x the target's state at t after its final norm, head i predicts the token at t + 2 + i:

    x = x + SiLU(layers.j x + bias)     for each layer j
    logits = lm_head x                  its own (version 1) or the target's (version 2)

Invariant: `shapes()` holds every parameter of every head, each read from the file or, for a bias
that the file lacks, zero.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from runtime.errors import CheckpointError, UnsupportedModel, VocabularyMismatch

from .checkpoint import Checkpoint
from .config_value import config_value
from .head_files import HeadFiles, open_head_files
from .medusa_layout import TOKEN_MAP, MedusaLayout, read_layout
from .tensor_store import TensorStore, load_finite

logger = logging.getLogger(__name__)

_OUTPUT = "lm_head.weight"
# What configurations call a count: FasterDecoding's key, vLLM's.
_COUNTS = {
    "num_heads": ("medusa_num_heads", "num_heads"),
    "num_layers": ("medusa_num_layers", "num_hidden_layers"),
}


@dataclass(frozen=True, kw_only=True)
class MedusaHeads:
    name: str  # directory name or hub id
    revision: str  # hub commit, "" for local files
    sha256: str  # of config.json and weights
    num_heads: int
    num_layers: int  # residual blocks of each head
    version: int  # 1: a head has its own output matrix; 2: the target's is used
    vocab_size: int  # D, rows of an output matrix
    d2t: np.ndarray | None  # [D] int64, target id = i + d2t[i], in any order; None: equal ids
    hidden_size: int
    layout: MedusaLayout = field(repr=False)
    tensors: TensorStore = field(repr=False)  # by the file's names

    @property
    def borrows_head(self) -> bool:
        """The target's lm_head is every head's output matrix."""
        return self.version == 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name → shape, of every parameter."""
        return {name: self._shape(name) for name in sorted(self.layout.names())}

    def load(self, name: str) -> np.ndarray:
        """One parameter, float32; the array belongs to the caller.

        An output matrix over the whole vocabulary is cut to the rows of token_map. Raises
        CheckpointError for a name that no head has, or values that aren't finite.
        """
        if name not in self.layout.names():
            raise CheckpointError(
                f"{self.name}: received no {name!r}. Expected a name of shapes()."
            )
        if name not in self.layout.stored:
            return np.zeros(self.hidden_size, dtype=np.float32)
        value = load_finite(self.tensors, self.layout.stored[name], self.name)
        if self.d2t is not None and len(value) > self.vocab_size and name.endswith(_OUTPUT):
            return value[np.arange(self.vocab_size) + self.d2t]
        return value

    def _shape(self, name: str) -> tuple[int, ...]:
        if name.endswith(_OUTPUT):
            return (self.vocab_size, self.hidden_size)
        return (self.hidden_size,) * (2 if name.endswith("weight") else 1)


def open_medusa(source: str | Path, target: Checkpoint) -> MedusaHeads:
    """Open heads for `target`.

    Raises CheckpointError where files and target don't fit, as VocabularyMismatch for the map of
    tokens. A configuration that disagrees with the tensors is only warned of.
    """
    files = open_head_files(source)
    files.warn_of_pickle()
    _check_variant(files)
    layout = read_layout(files.tensors.names(), files.name)
    d2t = _token_map(files, target.config.vocab_size)
    _check_shapes(files, layout, target, d2t)
    stated = config_value(files.config, "base_model_name_or_path", str, files.name)
    files.check_target(target, stated)
    _warn(files, layout)
    return MedusaHeads(
        name=files.name,
        revision=files.revision,
        sha256=files.tensors.sha256(),
        num_heads=layout.num_heads,
        num_layers=layout.num_layers,
        version=1 if layout.has_outputs else 2,
        vocab_size=target.config.vocab_size if d2t is None else len(d2t),
        d2t=d2t,
        hidden_size=target.config.hidden_size,
        layout=layout,
        tensors=files.tensors,
    )


def _token_map(files: HeadFiles, target_size: int) -> np.ndarray | None:
    """vLLM's token_map [D], target ids in the order of the rows, as offsets."""
    if TOKEN_MAP not in files.tensors.names():
        return None
    ids = files.tensors.load(TOKEN_MAP)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise VocabularyMismatch(
            f"{files.name}: {TOKEN_MAP}: received {ids.dtype} {list(ids.shape)}. Expected int64 "
            "[draft_vocab]; save the heads again."
        )
    if ids.min() < 0 or ids.max() >= target_size:
        raise VocabularyMismatch(
            f"{files.name}: {TOKEN_MAP}: received target tokens {ids.min()} to {ids.max()}. "
            f"Expected 0 to {target_size - 1}; the heads were made for another target."
        )
    if len(np.unique(ids)) != len(ids):
        raise VocabularyMismatch(
            f"{files.name}: {TOKEN_MAP}: received {len(ids)} entries of which "
            f"{len(np.unique(ids))} differ. Expected each target token once; the map is damaged."
        )
    return ids.astype(np.int64) - np.arange(len(ids))


def _check_shapes(
    files: HeadFiles, layout: MedusaLayout, target: Checkpoint, d2t: np.ndarray | None
) -> None:
    hidden, size = target.config.hidden_size, target.config.vocab_size
    allowed = {size} if d2t is None else {size, len(d2t)}
    if d2t is not None and not layout.has_outputs:
        raise UnsupportedModel(
            f"{files.name}: received {TOKEN_MAP} without output matrices. Expected one a head; "
            "save the heads with theirs."
        )
    for name, stored in sorted(layout.stored.items()):
        shape = files.tensors.shape(stored)
        output = name.endswith(_OUTPUT)
        if shape[-1] != hidden or (not output and shape != (hidden,) * len(shape)):
            raise CheckpointError(
                f"{files.name}: {stored}: received {list(shape)}. Expected {hidden} wide, the "
                f"hidden size of {target.name}; use the target that the heads were made for."
            )
        if output and (len(shape) != 2 or shape[0] not in allowed):
            raise VocabularyMismatch(
                f"{files.name}: {stored}: received {shape[0]} rows. Expected "
                f"{' or '.join(map(str, sorted(allowed)))}, the tokens of {target.name}; use the "
                "target that the heads were made for."
            )


def _check_variant(files: HeadFiles) -> None:
    if files.config.get("original_lm_head"):
        raise UnsupportedModel(
            f"{files.name}: received original_lm_head, one output matrix for all heads. Expected "
            "one a head, or none and the target's; drop the matrix and the key from the head."
        )


def _warn(files: HeadFiles, layout: MedusaLayout) -> None:
    """The tensors are right, whatever config.json says; yet it may be of another head."""
    found = {"num_heads": layout.num_heads, "num_layers": layout.num_layers}
    for what, keys in _COUNTS.items():
        _warn_of(files, keys, str(found[what]))
    _warn_of(files, ("version",), "1" if layout.has_outputs else "2")


def _warn_of(files: HeadFiles, keys: tuple[str, ...], found: str) -> None:
    stated = next((key for key in keys if files.config.get(key) is not None), None)
    if stated is not None and str(files.config[stated]) != found:
        logger.warning(
            "%s: config.json says %s %s, the tensors %s; they are believed.",
            files.name, stated, files.config[stated], found,
        )  # fmt: skip
