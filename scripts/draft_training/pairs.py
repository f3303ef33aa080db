"""Which positions of a conversation a head learns to draft from, and their labels.

Pair i, the state of token i beside the embedding of token i + 1, predicts token i + 2, and step j
of its chain token i + 2 + j. The label of that is row i + 1 + j of the conversation: what the
target predicts behind the last token which that step has read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .evaluate import DRAFT_TOKENS
from .features import wait_for_features
from .labels import wait_for_chunk
from .training import Row, label_rows

STEPS = DRAFT_TOKENS
STEP_WEIGHT = 0.8  # of a step's loss, against that of the step before


def state_rows(work: Path, index: int) -> Iterator[Row]:
    """A chunk's conversations with labels and ``states`` (see ``features``), once they're there."""
    states = wait_for_features(work, index)
    end = 0
    for row in label_rows(wait_for_chunk(work, index)):
        begin, end = end, end + len(row["ids"])
        yield row | {"states": states[begin:end]}


def draw(
    row: Row, *, prompt_share: float, step_share: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Each step's pairs: at first all that predict an answer, and some of the prompt's.

    Args:
        step_share: of a step's pairs that go on to the next.

    Returns:
        # STEPS x [pairs] i64, ascending, each step's among those of the one before
    """
    first = int(row["prompt"]) - 1
    in_prompt = np.flatnonzero(rng.random(first) < prompt_share)
    pairs = np.concatenate([in_prompt, np.arange(first, len(row["ids"]))])
    steps = []
    for step in range(STEPS):
        if step and step_share < 1:
            pairs = pairs[rng.random(len(pairs)) < step_share]
        pairs = with_label(pairs, step, len(row["ids"]))
        steps.append(pairs)
    return steps


def with_label(pairs: np.ndarray, step: int, length: int) -> np.ndarray:
    """Those of ``pairs`` whose token of that step is within the conversation."""
    return pairs[pairs + 2 + step < length]


def flatten(lengths: Sequence[int], rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Indices into each conversation as indices into all, laid end to end. # [all] i64"""
    begins = np.cumsum([0, *lengths[:-1]])
    flat = [begin + row for begin, row in zip(begins, rows, strict=True)]
    return torch.from_numpy(np.concatenate(flat).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class StepLabels:
    """The labels of one step's pairs."""

    top_ids: torch.Tensor  # [pairs, TOP] i64
    top_p: torch.Tensor  # [pairs, TOP] f32


def step_labels(rows: Sequence[Row], steps: Sequence[torch.Tensor]) -> tuple[StepLabels, ...]:
    """The labels of each step's pairs, which index ``rows`` laid end to end."""
    ids = np.concatenate([row["top_ids"] for row in rows]).astype(np.int64)
    p = np.concatenate([row["top_p"] for row in rows]).astype(np.float32)
    behind = [(pairs + 1 + step).numpy() for step, pairs in enumerate(steps)]
    return tuple(
        StepLabels(top_ids=torch.from_numpy(ids[at]), top_p=torch.from_numpy(p[at]))
        for at in behind
    )


def weighted(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The steps' losses in one. # scalar"""
    weights = STEP_WEIGHT ** torch.arange(len(losses), dtype=torch.float32)
    return (torch.stack(list(losses)) * weights).sum() / weights.sum()
