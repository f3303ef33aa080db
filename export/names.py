"""Does a checkpoint hold the parameters that a model expects?

Names are compared as they stand and with the model's base prefix (`model.`, `transformer.`) added
or removed; anything else that differs is refused with the tensors named, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from runtime.errors import CheckpointError

from .checkpoint import Checkpoint
from .model_config import model_class, tied_names

# Buffers that older checkpoints saved and that the model computes itself.
_BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)")


def match_names(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Expected parameter → its name in the checkpoint.

    expected: name → shape, as in the model's state dict. Raises CheckpointError listing parameters
    that are missing, of another shape, or in the checkpoint without being expected. A weight that
    the configuration ties may be stored twice, as long as the values are the same.
    """
    found = {name: checkpoint.find(name) for name in expected}
    matched = {name: key for name, key in found.items() if key is not None}
    misshaped = [
        f"{key} {list(checkpoint.shape(key))} instead of {list(expected[name])}"
        for name, key in matched.items()
        if checkpoint.shape(key) != tuple(expected[name])
    ]
    missing = sorted(name for name, key in found.items() if key is None)
    used = set(matched.values()) | {checkpoint.stored(key) for key in matched.values()}
    unexpected = sorted(_unexpected(checkpoint, checkpoint.names() - used))
    if missing or misshaped or unexpected:
        raise CheckpointError(
            f"{checkpoint.name}: {_list('missing', missing)}{_list('of another shape', misshaped)}"
            f"{_list('unexpected', unexpected)}Expected exactly the parameters of "
            f"{checkpoint.config.model_type}; the checkpoint and its configuration are of "
            "different models, or it needs saving again with transformers."
        )
    return matched


def _unexpected(checkpoint: Checkpoint, spare: frozenset[str]) -> set[str]:
    """Spare names that are no known buffer, no ignorable extra and no tied twin of a match."""
    kind = model_class(checkpoint.config)
    ignorable = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    aliases = checkpoint.names() - checkpoint.tensors.names()
    return {
        name
        for name in spare - aliases - _twins(checkpoint, spare)
        if not _BUFFERS.fullmatch(name) and not any(re.search(p, name) for p in ignorable)
    }


def _twins(checkpoint: Checkpoint, spare: frozenset[str]) -> set[str]:
    """Spare names that the configuration ties to a tensor of the same values, stored twice.

    Where the values differ, transformers would untie them: the name stays unexpected.
    """
    pairs = [
        (checkpoint.find(name), checkpoint.find(source))
        for name, source in tied_names(checkpoint.config).items()
    ]
    return {
        name
        for one, other in pairs
        for name, twin in ((one, other), (other, one))
        if name in spare
        and name is not None
        and twin is not None
        and np.array_equal(checkpoint.load(name), checkpoint.load(twin))
    }


def _list(what: str, names: list[str]) -> str:
    return f"{len(names)} {what}: {shorten(names)}. " if names else ""


def shorten(names: list[str], limit: int = 6) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
