"""Batches, loss and drafts of the EAGLE-3 head: chains from every answer token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .eagle import EagleHead, Packed, Pairs
from .features import TAPS
from .pairs import STEPS, StepLabels, draw, flatten, step_labels, weighted, with_label
from .student import distillation_loss
from .training import Row, TrainOptions

STEP_SHARE = 0.7  # of a step's pairs that go on: as in decoding, fewer reach a later step


@dataclass(frozen=True, kw_only=True)
class ChainBatch:
    """One optimizer step's worth of conversations."""

    progress: float  # 0 to 1, share of the run's conversations seen before this batch
    packed: Packed
    labels: tuple[StepLabels, ...]


def collate_chains(
    rows: Sequence[Row], progress: float, options: TrainOptions, rng: np.random.Generator
) -> ChainBatch:
    """Lay ``rows`` end to end, and draw the pairs that are scored."""
    chains = [
        draw(row, prompt_share=options.prompt_share, step_share=STEP_SHARE, rng=rng) for row in rows
    ]
    packed = pack([row["ids"] for row in rows], [row["states"] for row in rows], chains)
    labels = step_labels(rows, [pairs.index for pairs in packed.steps])
    return ChainBatch(progress=progress, packed=packed, labels=labels)


def pack(
    ids: Sequence[np.ndarray],
    states: Sequence[np.ndarray],
    chains: Sequence[Sequence[np.ndarray]],
) -> Packed:
    """Lay conversations end to end.

    Args:
        states: # [tokens, TAPS + 1, H] f16 each
        chains: each step's pairs, of each conversation. # [pairs] i64 each
    """
    lengths = tuple(map(len, ids))
    features = np.concatenate(states)[:, :TAPS].astype(np.float32)
    return Packed(
        tokens=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        features=torch.from_numpy(features).flatten(1),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        lengths=lengths,
        steps=tuple(
            Pairs(index=flatten(lengths, step), counts=tuple(map(len, step)))
            for step in zip(*chains, strict=True)
        ),
    )


def chain_loss(
    head: EagleHead, batch: ChainBatch, overlap_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted mean of the steps' losses, and each step's overlap. # scalar, [STEPS] f32"""
    states = head(batch.packed)
    logits = head.lm_head(head.norm(torch.cat(states)))  # one product for all steps
    parts = [
        # A batch of short answers may have no pair left: its mean would be NaN.
        distillation_loss(part, step.top_ids, step.top_p, overlap_weight)
        if len(part)
        else logits.new_zeros(2)
        for part, step in zip(logits.split([len(s) for s in states]), batch.labels, strict=True)
    ]
    return weighted([loss for loss, _ in parts]), torch.stack([overlap for _, overlap in parts])


def chain_draft(
    head: EagleHead, ids: np.ndarray, states: np.ndarray, first: int
) -> list[torch.Tensor]:
    """Each step's q of the chains from pair ``first`` on (see ``chain_figures.Draft``)."""
    pairs = np.arange(first, len(ids))
    chain = [with_label(pairs, step, len(ids)) for step in range(STEPS)]
    steps = head(pack([ids], [states], [chain]))
    return [F.softmax(head.lm_head(head.norm(state)), -1) for state in steps]
