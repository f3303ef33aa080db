"""Chains that are launched whole, whoever drafts them: a draft model, an EAGLE head or Medusa's.

Before a launch the drafter reads what the round's first step doesn't; afterwards it takes note of
what that step read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from .captured_calls import Binds
from .captured_head import HeadEngines, HeadProgram, StateInputs
from .captured_medusa import MedusaEngines, MedusaProgram
from .captured_round import CapturedRounds, RoundEngines, RoundInputs, RoundProgram
from .capturing import Capturing
from .draft_model import DraftModel
from .drafter import Drafter
from .eagle_drafter import EagleDrafter
from .manifest import Manifest
from .medusa_drafter import MedusaDrafter
from .sampling import SamplingParams
from .target import TargetStep

Array = NDArray[Any]
WholeDrafter = DraftModel | EagleDrafter | MedusaDrafter


def captured_chains(
    executors: Mapping[str, Binds],
    target: TargetStep,
    drafter: WholeDrafter,
    manifest: Manifest,
    capturing: Capturing,
) -> CapturedRounds:
    """executors: by the graph's name."""
    engines, program = _engines(executors, target, drafter)
    return CapturedRounds(
        engines,
        vocab=manifest.target.vocab_size,
        draft_vocab=manifest.draft_vocab_size,
        capturing=capturing,
        program=program,
    )


def _engines(
    executors: Mapping[str, Binds], target: TargetStep, drafter: WholeDrafter
) -> tuple[RoundEngines, type[RoundProgram]]:
    if isinstance(drafter, MedusaDrafter):
        return _of_medusa(executors, target, drafter), MedusaProgram
    engines = RoundEngines(
        target=executors["target"],
        draft=executors["draft"],
        accept=executors["accept"],
        target_caches=target.caches,
        draft_caches=drafter.caches,
    )
    if isinstance(drafter, DraftModel):
        return engines, RoundProgram
    head = HeadEngines(
        **vars(engines),
        fuse=executors.get("fuse"),
        feature_width=drafter.features.width,
        state_width=drafter.state_width,
    )
    return head, HeadProgram


def _of_medusa(
    executors: Mapping[str, Binds], target: TargetStep, drafter: MedusaDrafter
) -> MedusaEngines:
    _, num_heads, head_vocab = drafter.logits.shape
    return MedusaEngines(
        target=executors["target"],
        draft=executors["tail"],
        accept=executors["accept"],
        target_caches=target.caches,
        draft_caches={},
        feature_width=drafter.features.width,
        heads=executors["heads"],
        num_heads=num_heads,
        head_vocab=head_vocab,
    )


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
        rows = len(tokens) - 2 - k - drafter.window.base
    elif isinstance(drafter, MedusaDrafter) and drafter.offer(tokens, k).num_tokens == k:
        rows = 0  # it has no cache
    else:
        return None
    return StateInputs(
        tokens=tokens,
        draft_rows=rows,
        uniforms=uniforms,
        params=params,
        features=drafter.features,
    )


def settle(drafter: Drafter | None, committed: int, k: int) -> None:
    """The round has run behind `committed` tokens: its rows are in the draft's cache."""
    if isinstance(drafter, DraftModel):
        drafter.window.rows = committed - drafter.window.base + k - 1
    elif isinstance(drafter, EagleDrafter):  # the rows of its own steps are forgotten
        drafter.window.rows = committed - 1 - drafter.window.base
    elif isinstance(drafter, MedusaDrafter):
        drafter.has_read(committed - 1)
