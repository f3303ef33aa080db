"""Medusa heads (arXiv 2401.10774): each guesses one later token from the target's last state.

Head i turns the state behind the final norm into one that the target's own head reads as token
t + 2 + i: ``x + SiLU(Wx + b)``. The heads are trained against the rows of that head which belong to
the draft vocabulary; a decoder uses all of them, so this is the published version 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from .features import TAPS
from .pairs import STEPS, StepLabels, draw, flatten, step_labels, weighted, with_label
from .student import distillation_loss
from .training import Row, TrainOptions


class Block(nn.Module):
    """A residual layer, under its published name."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)  # each head begins as the target's own choice
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Trainable heads; the target's head rows stay as they are."""

    rows: torch.Tensor  # [D, H] f32

    def __init__(self, target: PreTrainedModel, vocabulary: torch.Tensor) -> None:
        super().__init__()
        head = target.get_output_embeddings().weight.detach()
        self.heads = nn.ModuleList(nn.ModuleList([Block(head.shape[1])]) for _ in range(STEPS))
        self.register_buffer("rows", head[vocabulary], persistent=False)

    def forward(self, index: int, states: torch.Tensor) -> torch.Tensor:
        """Logits of one head. # [states, D] f32"""
        return self.heads[index][0](states) @ self.rows.T

    def own_state(self) -> dict[str, torch.Tensor]:
        """Every tensor under the names of the published file."""
        return self.heads.state_dict()

    def load_own_state(self, state: dict[str, torch.Tensor]) -> None:
        self.heads.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class StateBatch:
    """One optimizer step's worth of states, each with the labels of the tokens behind it."""

    progress: float  # 0 to 1, share of the run's conversations seen before this batch
    states: tuple[torch.Tensor, ...]  # per head: [pairs, H] f32, behind the final norm
    labels: tuple[StepLabels, ...]


def collate_states(
    rows: Sequence[Row], progress: float, options: TrainOptions, rng: np.random.Generator
) -> StateBatch:
    """Draw the states of ``rows`` that are scored; all heads get the same ones."""
    chains = [draw(row, prompt_share=options.prompt_share, step_share=1, rng=rng) for row in rows]
    lengths = [len(row["ids"]) for row in rows]
    pairs = [flatten(lengths, step) for step in zip(*chains, strict=True)]
    states = np.concatenate([row["states"][:, TAPS] for row in rows]).astype(np.float32)
    return StateBatch(
        progress=progress,
        states=tuple(torch.from_numpy(states[step.numpy()]) for step in pairs),
        labels=step_labels(rows, pairs),
    )


def state_loss(
    heads: MedusaHeads, batch: StateBatch, overlap_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted mean of the heads' losses, and each head's overlap. # scalar, [STEPS] f32"""
    parts = [
        distillation_loss(heads(i, states), labels.top_ids, labels.top_p, overlap_weight)
        if len(states)
        else states.new_zeros(2)
        for i, (states, labels) in enumerate(zip(batch.states, batch.labels, strict=True))
    ]
    return weighted([loss for loss, _ in parts]), torch.stack([overlap for _, overlap in parts])


def state_draft(
    heads: MedusaHeads, ids: np.ndarray, states: np.ndarray, first: int
) -> list[torch.Tensor]:
    """Each head's q from token ``first`` on (see ``chain_figures.Draft``)."""
    pairs = np.arange(first, len(ids))
    last = torch.from_numpy(states[:, TAPS].astype(np.float32))
    steps = [with_label(pairs, step, len(ids)) for step in range(STEPS)]
    return [F.softmax(heads(i, last[torch.from_numpy(s)]), -1) for i, s in enumerate(steps)]
