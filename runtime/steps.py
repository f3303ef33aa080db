"""What a round is made of, over one set of buffers."""

from __future__ import annotations

from dataclasses import dataclass

from .accept import AcceptStep
from .buffers import RoundBuffers
from .drafter import Drafter
from .target import TargetStep
from .tree_shape import Brancher


@dataclass(frozen=True, kw_only=True)
class Steps:
    """drafter: None where nothing drafts. brancher: its way to make trees, where it has one."""

    buffers: RoundBuffers
    target: TargetStep
    drafter: Drafter | None
    accept: AcceptStep
    brancher: Brancher | None = None
