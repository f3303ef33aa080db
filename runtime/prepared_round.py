"""What a drafter does around a round that is launched whole: it reads what the round's first step
doesn't, and takes note afterwards of what that step read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from .captured_head import HeadInputs
from .captured_round import RoundInputs
from .draft_model import DraftModel
from .drafter import Drafter
from .eagle_drafter import EagleDrafter
from .sampling import SamplingParams

Array = NDArray[Any]


def prepared(
    drafter: Drafter | None, tokens: Sequence[int], k: int, uniforms: Array, params: SamplingParams
) -> RoundInputs | None:
    """The inputs of a round of k drafts behind the committed `tokens`, at least two; None where
    such a round can't be whole."""
    if isinstance(drafter, DraftModel):
        drafter.catch_up(tokens, k)
        return RoundInputs(
            tokens=tokens,
            draft_rows=len(tokens) - 2 - drafter.window.base,
            uniforms=uniforms,
            params=params,
        )
    if isinstance(drafter, EagleDrafter) and drafter.catch_up(tokens, k):
        return HeadInputs(
            tokens=tokens,
            draft_rows=len(tokens) - 2 - k - drafter.window.base,
            uniforms=uniforms,
            params=params,
            features=drafter.features,
        )
    return None


def settle(drafter: Drafter | None, committed: int, k: int) -> None:
    """The round has run behind `committed` tokens: its rows are in the draft's cache."""
    if isinstance(drafter, DraftModel):
        drafter.window.rows = committed - drafter.window.base + k - 1
    elif isinstance(drafter, EagleDrafter):  # the rows of its own steps are forgotten
        drafter.window.rows = committed - 1 - drafter.window.base
