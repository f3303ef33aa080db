"""One run's inputs, read and checked before any work is done."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from .labels import LabelPlan, file_sha256
from .target import load_target, special_ids
from .text import Split, check_ids, draft_vocabulary, read_conversations, split


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run's inputs, read and checked."""

    target: PreTrainedModel
    split: Split
    vocabulary: np.ndarray  # [D] i64
    plan: LabelPlan
    work: Path


def prepare(
    target: Path,
    text: Path,
    work: Path,
    *,
    draft_vocab: int,
    held_out: int,
    chunk: int,
    conversations: int | None,
    seed: int,
) -> Job:
    """Read and check every input, and claim ``work``."""
    rows = read_conversations(text)
    model = load_target(target)
    vocab = model.config.vocab_size
    check_ids(rows, vocab)
    parts = split(rows, seed=seed, held_out=held_out, chunk=chunk)
    vocabulary = draft_vocabulary(
        (row for rows_ in parts.chunks for row in rows_),
        vocab=vocab,
        size=draft_vocab,
        always=special_ids(model),
    )
    plan = LabelPlan(
        target_sha256=file_sha256(target),
        text_sha256=file_sha256(text),
        seed=seed,
        held_out=held_out,
        chunk=chunk,
        draft_vocab=draft_vocab,
    )
    plan.claim(work)
    return Job(
        target=model,
        split=parts.first(conversations),
        vocabulary=vocabulary,
        plan=plan,
        work=work,
    )
