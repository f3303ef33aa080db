"""Medusa heads as a torch module: the eager reference, and what is traced.

Block: x + SiLU(Wx + b) on the state behind the target's last norm (arXiv 2401.10774, section 3.1).
Version 2 has no output matrices of its own: all heads go through the target's at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .medusa_heads import MedusaHeads


class MedusaModule(nn.Module):
    """The first `count` heads: features [batch, rows, H] → logits [batch, count, D] of the last."""

    def __init__(self, heads: MedusaHeads, count: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_Head(heads) for _ in range(count))
        self.lm_head = None
        if heads.borrows_head:
            self.lm_head = nn.Linear(heads.hidden_size, heads.vocab_size, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        state = features[:, -1:]
        rows = torch.cat([head(state) for head in self.heads], dim=1)
        return rows if self.lm_head is None else self.lm_head(rows)


class _Head(nn.Module):
    def __init__(self, heads: MedusaHeads) -> None:
        super().__init__()
        size = heads.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(heads.num_layers))
        self.lm_head = None
        if not heads.borrows_head:
            self.lm_head = nn.Linear(size, heads.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x if self.lm_head is None else self.lm_head(x)
