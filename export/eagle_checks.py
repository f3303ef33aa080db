"""Does an EAGLE head belong to this target? What a file can show is refused here, by name.

A tap that is off by one, or a head trained on another model of the same sizes, can't be seen in
the files: such a head drafts, and nothing that it drafts is accepted. The build measures that.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import numpy as np

from runtime.errors import CheckpointError, UnsupportedModel, VocabularyMismatch

from .checkpoint import Checkpoint
from .eagle_config import TAP_IDS, EagleConfig
from .eagle_layout import EMBEDDING, HEAD
from .model_config import model_class
from .tensor_store import TensorStore
from .vocabulary import read_draft_map

logger = logging.getLogger(__name__)

_TAPS = 3
_MIN_LAYERS = 7  # fewer, and the default taps 2, N // 2 and N - 3 aren't three ascending layers


def check_target(config: EagleConfig, target: Checkpoint) -> None:
    """Raise CheckpointError where config.json names another target than this one."""
    _check_made_for(config, target)
    wanted = target.config.hidden_size
    if config.target_hidden_size != wanted:
        raise CheckpointError(
            f"{config.name}: received a head for a target of hidden size "
            f"{config.target_hidden_size}. Expected {wanted}, the hidden size of {target.name}; "
            "use the target that the head was made for."
        )
    if config.version == 1 and config.layer.hidden_size != wanted:
        raise CheckpointError(
            f"{config.name}: received an EAGLE-1 head of hidden size {config.layer.hidden_size}. "
            f"Expected {wanted}, as {target.name} has: the head predicts the target's own state."
        )
    if config.layer.vocab_size != target.config.vocab_size:
        raise VocabularyMismatch(
            f"{config.name}: received a head for a target of {config.layer.vocab_size} tokens. "
            f"Expected {target.config.vocab_size}, the vocab_size of {target.name}; use the target "
            "that the head was made for."
        )


def check_map(config: EagleConfig, tensors: TensorStore, target: Checkpoint) -> np.ndarray | None:
    """d2t [D] int64, or None where draft and target ids are equal.

    Raises VocabularyMismatch for a map that is damaged or of another head.
    """
    size = target.config.vocab_size
    rows = tensors.shape(HEAD)[0] if HEAD in tensors.names() else size
    stated = config.draft_vocab_size
    if stated is not None and stated != rows:
        raise VocabularyMismatch(
            f"{config.name}: received draft_vocab_size {stated} and {rows} rows of lm_head. "
            "Expected one number; config.json and weights are of different heads."
        )
    if rows == size and not ("d2t" in tensors.names() and tensors.load("d2t").any()):
        return None  # training libraries leave maps that nobody filled
    d2t = read_draft_map(tensors, target_size=size)
    if d2t is None and rows != size:
        raise VocabularyMismatch(
            f"{config.name}: received a head of {rows} tokens and no d2t. Expected d2t, or the "
            f"target's {size} tokens; save the head with its map."
        )
    return d2t


def check_taps(config: EagleConfig, target: Checkpoint) -> tuple[int, ...]:
    """The taps as indices into HF hidden_states, (2, N // 2, N - 3) where config.json has none.

    Raises CheckpointError for taps that this target doesn't have.
    """
    if config.version == 1:
        return ()
    layers = target.config.num_hidden_layers
    default = (2, layers // 2, layers - 3)
    if config.taps is None:
        _check_depth(config, target, layers)
        return default
    _check_stated(config, target, layers)
    if config.taps == tuple(tap - 1 for tap in default):
        logger.warning(
            "%s: %s is %s, one less than the usual %s. Some trainers count outputs of layers "
            "where an index into hidden_states is read here. If nothing is accepted (a mean "
            "length of 1.0), add 1 to each in config.json.",
            config.name, TAP_IDS, list(config.taps), list(default),
        )  # fmt: skip
    return config.taps


def check_width(config: EagleConfig, tensors: TensorStore) -> None:
    """Raise CheckpointError where fc reads another number of hidden states than there are taps."""
    if config.version == 1 or "fc.weight" not in tensors.names():
        return
    shape = tensors.shape("fc.weight")
    if len(shape) == 2 and shape[1] != _TAPS * config.target_hidden_size:
        raise CheckpointError(
            f"{config.name}: received fc.weight of width {shape[1]}. Expected "
            f"{_TAPS * config.target_hidden_size}: {_TAPS} taps of hidden size "
            f"{config.target_hidden_size}; use the target that the head was made for."
        )


def lent_names(config: EagleConfig, tensors: TensorStore, target: Checkpoint) -> dict[str, str]:
    """What the file leaves to the target: canonical name → the name of the target's tensor.

    Raises CheckpointError where the target has none to share, or one of another width.
    """
    wanted = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
    missing = sorted(wanted.keys() - tensors.names())
    return {name: _lend(config, name, wanted[name], target) for name in missing}


def _lend(config: EagleConfig, name: str, wanted: str, target: Checkpoint) -> str:
    found = target.find(wanted)
    if found is None:
        raise CheckpointError(
            f"{config.name}: received no {name}, and {target.name} has no {wanted} to share. "
            "Expected a Llama-like target; save the head with its own."
        )
    width = target.shape(found)[1]
    if width != config.layer.hidden_size:
        raise CheckpointError(
            f"{config.name}: received no {name}. Expected it in the file, since the head's hidden "
            f"size {config.layer.hidden_size} isn't the target's {width}; save the head with its "
            "own."
        )
    return target.stored(found)


def _check_made_for(config: EagleConfig, target: Checkpoint) -> None:
    """The architecture must agree, where both sides name theirs."""
    kind = model_class(target.config)
    own = set(target.config.architectures or ()) | ({kind.__name__} if kind else set())
    wanted = set(config.made_for_architectures)
    if own and wanted and not own & wanted:
        raise CheckpointError(
            f"{config.name}: received a head for {sorted(wanted)}. Expected one for "
            f"{sorted(own)}, as {target.name} is; use the target that the head was made for."
        )


def _check_depth(config: EagleConfig, target: Checkpoint, layers: int) -> None:
    if layers < _MIN_LAYERS:
        raise UnsupportedModel(
            f"{config.name}: received no {TAP_IDS} for a target of {layers} layers. Expected at "
            f"least {_MIN_LAYERS}, so that layers 2, N / 2 and N - 3 are three; name the taps in "
            f"config.json, or use a deeper target than {target.name}."
        )


def _check_stated(config: EagleConfig, target: Checkpoint, layers: int) -> None:
    """hidden_states[N] is refused: transformers has it after the final norm, vLLM before it."""
    taps = config.taps or ()
    if len(taps) != _TAPS or any(a >= b for a, b in pairwise(taps)):
        raise UnsupportedModel(
            f"{config.name}: received {TAP_IDS} that read hidden states {list(taps)}. Expected "
            f"{_TAPS} of them, ascending."
        )
    if taps[0] < 0 or taps[-1] >= layers:
        raise CheckpointError(
            f"{config.name}: received {TAP_IDS} that read hidden states {list(taps)}. Expected 0 "
            f"to {layers - 1}, inputs of the layers of {target.name}; use the target that the "
            "head was made for."
        )
