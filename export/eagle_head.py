"""An EAGLE head beside its target: one decoder layer that drafts from the target's hidden states.

    open_eagle("path/or/hub-id", target) → EagleHead

Reads EAGLE-3 as published, EAGLE-3 of the speculators library, and EAGLE-1/2, and offers the same
names for all. Invariant: `shapes()` holds every parameter that the forward pass needs and no other,
each found in the head's file or lent by the target.

EAGLE-3, with e the embedding of token t + 1 and g made of the target's states at t:

    g = fc(cat[taps])            taps through fc_norm.j, or all through input_norm, before fc
    h = hidden_norm(g)
    x = (h if norm_before_residual else g) + attention(cat[input_layernorm(e), h])
    x = x + mlp(post_attention_layernorm(x))
    logits = lm_head(norm(x))    over the D tokens of d2t
    g of the next step = norm(x) if norm_output else x

EAGLE-1: x = fc(cat[e, the target's state after its final norm]), then the layer without
input_layernorm; logits = lm_head(x), and x is the next step's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from .checkpoint import Checkpoint
from .eagle_checks import check_map, check_taps, check_target, check_width, lent_names
from .eagle_config import EagleConfig, read_eagle_config
from .eagle_layout import HEAD, MAPS, canonical_names, check_shapes, head_shapes
from .head_files import HeadFiles, open_head_files
from .tensor_store import BorrowingStore, RenamedStore, TensorStore, load_finite


@dataclass(frozen=True, kw_only=True)
class EagleHead:
    name: str  # directory name or hub id
    revision: str  # hub commit, "" for local files
    sha256: str  # of config.json and weights
    version: int  # 3, or 1 for EAGLE-1 and -2
    config: PretrainedConfig  # of the one decoder layer
    taps: tuple[int, ...]  # HF hidden_states indices; () reads the state after the final norm
    target_hidden_size: int
    vocab_size: int  # D, rows of the output head
    d2t: np.ndarray | None  # [D] int64, target id = i + d2t[i]; None: equal ids
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norms: bool
    norm_output: bool
    borrowed: Mapping[str, str]  # canonical name → the target's tensor that stands for it
    tensors: TensorStore = field(repr=False)  # by canonical names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name → shape, of every parameter."""
        return {name: self.tensors.shape(name) for name in sorted(self.tensors.names())}

    def load(self, name: str) -> np.ndarray:
        """One parameter, float32; the array belongs to the caller.

        Raises CheckpointError where a value isn't finite.
        """
        return load_finite(self.tensors, name, self.name)


def open_eagle(source: str | Path, target: Checkpoint) -> EagleHead:
    """Open a head for `target`.

    Raises CheckpointError where files and target don't fit, as VocabularyMismatch for the map of
    tokens, UnsupportedModel for a variant that isn't carried.
    """
    files = open_head_files(source)
    files.warn_of_pickle()
    config = read_eagle_config(files.config, files.tensors.names(), files.name)
    own = RenamedStore(own=files.tensors, stored=canonical_names(files.tensors))
    check_target(config, target)
    files.check_target(target, config.made_for)
    taps = check_taps(config, target)
    check_width(config, own)
    d2t = check_map(config, own, target)
    return _head(files, config, _with_target(config, own, target), taps, d2t)


def _with_target(config: EagleConfig, own: TensorStore, target: Checkpoint) -> BorrowingStore:
    """The head's tensors and those that the target lends, all of them as expected."""
    size = target.config.vocab_size
    rows = own.shape(HEAD)[0] if HEAD in own.names() else size
    store = BorrowingStore(
        own=own, lender=target.tensors, borrowed=lent_names(config, own, target), hidden=MAPS
    )
    check_shapes(config.name, store, head_shapes(config, own, rows=rows, target_vocab_size=size))
    return store


def _head(
    files: HeadFiles,
    config: EagleConfig,
    tensors: BorrowingStore,
    taps: tuple[int, ...],
    d2t: np.ndarray | None,
) -> EagleHead:
    return EagleHead(
        name=files.name,
        revision=files.revision,
        sha256=files.tensors.sha256(),
        version=config.version,
        config=config.layer,
        taps=taps,
        target_hidden_size=config.target_hidden_size,
        vocab_size=tensors.shape(HEAD)[0],
        d2t=d2t,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norms=config.fc_norms,
        norm_output=config.norm_output,
        borrowed=tensors.borrowed,
        tensors=tensors,
    )
