"""Which tensors of a bundle's engines stay on the device: what one engine writes, another reads,
and the host never looks at.
"""

from __future__ import annotations

from ..contract import (
    DRAFT_PROBS,
    DRAFT_STEP_PROBS,
    HEAD_LOGITS,
    LOGITS,
    NEXT_STATE,
    STATES,
)
from ..manifest import EagleDraft, Manifest
from ..tree_contract import ON_DEVICE

#: what drafts a token, and writes its row of q where accept reads it
_SAMPLING = ("draft", "tail")


def resident_tensors(graph: str, manifest: Manifest) -> frozenset[str]:
    """Of this graph's tensors, those that are never copied from or to the host."""
    engines = {name for name in _SAMPLING if f"engines/{name}.plan" in manifest.files}
    found = {LOGITS.name, HEAD_LOGITS.name, *ON_DEVICE}
    if engines:  # a lookup's q, and that of a draft on the CPU, the host writes
        found |= {DRAFT_PROBS.name, DRAFT_STEP_PROBS.name}
    draft = manifest.draft
    # EAGLE-3's states are `fuse`'s or the head's own. Of EAGLE-1 they are the target's, which the
    # host keeps. `branch` gives and takes them row by row, as the host picks them.
    if graph == "draft" and isinstance(draft, EagleDraft) and draft.version == 3:
        found |= {STATES.name, NEXT_STATE.name}
    return frozenset(found)
