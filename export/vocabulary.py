"""Do target and draft speak the same tokens?

Speculation passes token ids from one model to the other. Equal ids must mean equal text; rows that
only pad a vocabulary to a round size mean nothing and may differ.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from runtime.errors import CheckpointError, VocabularyMismatch

from .tensor_store import TensorStore


def check_vocabularies(
    target: Tokenizer, draft: Tokenizer, *, target_size: int, draft_size: int
) -> None:
    """Compare token by token; an id that one side does not use is padding.

    target_size, draft_size: rows of the two output heads. Raises VocabularyMismatch with both sizes
    and the first token that differs.
    """
    tokens, other = _by_id(target), _by_id(draft)
    for token_id in sorted(tokens.keys() & other.keys()):
        if tokens[token_id] != other[token_id]:
            raise VocabularyMismatch(
                f"draft vocabulary: received {draft_size} rows, {len(other)} tokens. Expected the "
                f"target's {target_size} rows, {len(tokens)} tokens; token {token_id} is "
                f"{other[token_id]!r} instead of {tokens[token_id]!r}. Use a draft of the target's "
                "family, train one with scripts/train_draft.py, or build with --retokenize, which "
                "drafts in the draft's own tokens and is slower."
            )
    if not tokens.keys() & other.keys():
        raise VocabularyMismatch(
            f"draft vocabulary: received {len(other)} tokens, target {len(tokens)}. Expected "
            "tokens that both have; one of the tokenizers is empty."
        )


def read_draft_map(tensors: TensorStore, *, target_size: int) -> np.ndarray | None:
    """The map of a trimmed draft: d2t [D] int64 with target id = i + d2t[i], or None.

    Raises VocabularyMismatch where the map is out of order, leaves the target's vocabulary of
    `target_size` tokens, has another length than the head, or disagrees with t2d.
    """
    names = tensors.names()
    head = tensors.shape("lm_head.weight")[0] if "lm_head.weight" in names else target_size
    if "d2t" not in names:
        if head < target_size and "t2d" in names:
            raise CheckpointError(
                f"draft: received t2d but no d2t for a head of {head} tokens. Expected both; save "
                "the draft again."
            )
        return None
    d2t = _integers(tensors.load("d2t"))
    _check_map(d2t, head, target_size)
    if "t2d" in names:
        _check_inverse(d2t, tensors.load("t2d"), target_size)
    return d2t


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}


def _integers(d2t: np.ndarray) -> np.ndarray:
    if d2t.ndim != 1 or not np.issubdtype(d2t.dtype, np.integer):
        raise VocabularyMismatch(
            f"d2t: received {d2t.dtype} {list(d2t.shape)}. Expected int64 [draft_vocab]; save the "
            "draft again."
        )
    return d2t.astype(np.int64)


def _check_map(d2t: np.ndarray, head: int, target_size: int) -> None:
    if d2t.size != head:
        raise VocabularyMismatch(
            f"d2t: received {d2t.size} entries. Expected {head}, one for each row of lm_head; the "
            "map belongs to another draft."
        )
    ids = np.arange(d2t.size) + d2t
    outside = np.flatnonzero((ids < 0) | (ids >= target_size))
    if outside.size:
        i = int(outside[0])
        raise VocabularyMismatch(
            f"d2t: received target token {ids[i]} for draft token {i}. Expected 0 to "
            f"{target_size - 1}; the draft was made for another target."
        )
    backwards = np.flatnonzero(np.diff(ids) <= 0)
    if backwards.size:
        i = int(backwards[0])
        raise VocabularyMismatch(
            f"d2t: received target tokens {ids[i]}, {ids[i + 1]} for draft tokens {i}, {i + 1}. "
            "Expected ascending ids, target id = i + d2t[i]; the map is damaged."
        )


def _check_inverse(d2t: np.ndarray, t2d: np.ndarray, target_size: int) -> None:
    expected = np.zeros(target_size, dtype=bool)
    expected[np.arange(d2t.size) + d2t] = True
    if t2d.shape != expected.shape:
        raise VocabularyMismatch(
            f"t2d: received shape {list(t2d.shape)}. Expected [{target_size}], the target's "
            "vocabulary; the draft was made for another target."
        )
    differing = np.flatnonzero(t2d.astype(bool) != expected)
    if differing.size:
        raise VocabularyMismatch(
            f"t2d: received {bool(t2d[differing[0]])} for target token {differing[0]}, d2t says "
            "otherwise. Expected maps of one draft; save the draft again."
        )
