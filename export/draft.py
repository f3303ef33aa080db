"""A draft model beside its target: its own vocabulary and the embedding that it may borrow.

Three kinds: an ordinary checkpoint of the target's family, whose tokens are compared with the
target's; a distilled draft (scripts/train_draft.py) that shares the target's tokenizer and
embedding and proposes only some of its tokens; and, where it is asked for, one of other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from runtime.errors import BuildError, CheckpointError, VocabularyMismatch

from .checkpoint import Checkpoint, open_checkpoint
from .eager import build_eager
from .tensor_store import BorrowingStore
from .vocabulary import check_vocabularies, read_draft_map

_MAPS = frozenset({"d2t", "t2d"})


@dataclass(frozen=True, kw_only=True)
class Draft:
    checkpoint: Checkpoint  # a borrowed embedding resolves to the target's tensor
    vocab_size: int  # D, rows of the output head
    d2t: np.ndarray | None  # [D] int64, target id = i + d2t[i]; None: equal ids
    borrowed_embedding: str | None  # the target's tensor, where the draft has none of its own

    def load_eager(self) -> PreTrainedModel:
        """The whole model in float32; its logits are over the draft's own D tokens."""
        return self.checkpoint.load_eager()


def open_draft(source: str | Path, target: Checkpoint, *, revision: str | None = None) -> Draft:
    """Open a draft for `target`.

    Raises VocabularyMismatch where the two do not speak the same tokens, CheckpointError for
    another hidden size or a missing part.
    """
    checkpoint = open_checkpoint(source, revision=revision)
    if _distilled(checkpoint):
        return _open_distilled(checkpoint, target)
    _check_tokens(checkpoint, target)
    size = checkpoint.config.vocab_size
    return Draft(checkpoint=checkpoint, vocab_size=size, d2t=None, borrowed_embedding=None)


def open_foreign(source: str | Path, target: Checkpoint, *, revision: str | None = None) -> Draft:
    """Open a draft whose tokens are its own, for a target of other tokens.

    Raises BuildError where the two speak the same ones, CheckpointError where it has no tokenizer.
    """
    checkpoint = open_checkpoint(source, revision=revision)
    if _distilled(checkpoint) or _speaks_the_same(checkpoint, target):
        raise BuildError(
            f"--retokenize: received {checkpoint.name}, which speaks the tokens of {target.name}. "
            "Expected a draft of another tokenizer; build without --retokenize, which is faster."
        )
    size, largest = checkpoint.config.vocab_size, _largest_token(checkpoint)
    if largest >= size:
        raise CheckpointError(
            f"{checkpoint.name}: received a tokenizer with token {largest}. Expected tokens below "
            f"{size}, the rows of its head; its tokenizer belongs to another model."
        )
    return Draft(checkpoint=checkpoint, vocab_size=size, d2t=None, borrowed_embedding=None)


def _distilled(checkpoint: Checkpoint) -> bool:
    """It shares its target's tokens, and has some of them or names the target."""
    named = getattr(checkpoint.config, "outrider", None) is not None
    return named or bool(checkpoint.tensors.names() & _MAPS)


def _speaks_the_same(checkpoint: Checkpoint, target: Checkpoint) -> bool:
    try:
        _check_tokens(checkpoint, target)
    except VocabularyMismatch:
        return False
    return True


def _largest_token(checkpoint: Checkpoint) -> int:
    return max(checkpoint.text_files().tokenizer.get_vocab(with_added_tokens=True).values())


def _open_distilled(checkpoint: Checkpoint, target: Checkpoint) -> Draft:
    _check_sizes(checkpoint, target)
    d2t = read_draft_map(checkpoint.tensors, target_size=target.config.vocab_size)
    size = checkpoint.tensors.shape("lm_head.weight")[0]
    if d2t is None and size != target.config.vocab_size:
        raise VocabularyMismatch(
            f"{checkpoint.name}: received a head of {size} tokens and no d2t. Expected d2t, or the "
            f"target's {target.config.vocab_size} tokens; save the draft with its map."
        )
    borrowed = _borrowed(checkpoint, target)
    store = BorrowingStore(
        own=checkpoint.tensors, lender=target.tensors, borrowed=borrowed, hidden=_MAPS
    )
    checkpoint = replace(checkpoint, tensors=store, read_model=partial(build_eager, head_rows=size))
    lent = next(iter(borrowed.values()), None)
    return Draft(checkpoint=checkpoint, vocab_size=size, d2t=d2t, borrowed_embedding=lent)


def _check_sizes(checkpoint: Checkpoint, target: Checkpoint) -> None:
    own, wanted = checkpoint.config.hidden_size, target.config.hidden_size
    if own != wanted:
        raise CheckpointError(
            f"{checkpoint.name}: received a draft of hidden size {own}. Expected {wanted}, the "
            f"hidden size of {target.name}; use the target that the draft was made for."
        )
    stated = (getattr(checkpoint.config, "outrider", None) or {}).get("target_vocab_size")
    if stated not in (None, target.config.vocab_size):
        raise VocabularyMismatch(
            f"{checkpoint.name}: received a draft for a target of {stated} tokens. Expected "
            f"{target.config.vocab_size}, the size of {target.name}; use the target that the draft "
            "was made for."
        )
    if "lm_head.weight" not in checkpoint.tensors.names():
        raise CheckpointError(
            f"{checkpoint.name}: received no lm_head.weight. Expected the draft's own head; save "
            "the draft again."
        )


def _borrowed(checkpoint: Checkpoint, target: Checkpoint) -> dict[str, str]:
    """The embedding, where the draft has none: its name → the target's name."""
    name = "model.embed_tokens.weight"
    if name in checkpoint.tensors.names():
        return {}
    lent = target.find(name)
    if lent is None:
        raise CheckpointError(
            f"{checkpoint.name}: received no {name}, and {target.name} has none to share. Expected "
            "a Llama-like target; save the draft with its embedding."
        )
    return {name: target.stored(lent)}


def _check_tokens(checkpoint: Checkpoint, target: Checkpoint) -> None:
    check_vocabularies(
        target.text_files().tokenizer,
        checkpoint.text_files().tokenizer,
        target_size=target.config.vocab_size,
        draft_size=checkpoint.config.vocab_size,
    )
