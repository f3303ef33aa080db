"""Every kind of head that engines carry; a new kind is a case here."""

from __future__ import annotations

from pathlib import Path

from runtime.manifest import Limits

from .eagle_draft import EagleDraftPlan
from .eagle_engine_draft import write_eagle_head
from .engine_head import EngineHead
from .engine_precision import EnginePrecision
from .medusa_draft import MedusaDraftPlan
from .medusa_engine import write_medusa_heads

HeadPlan = EagleDraftPlan | MedusaDraftPlan


def head_name(draft: HeadPlan) -> str:
    """Without the precision, which is an engine's here."""
    return draft.head.name if isinstance(draft, EagleDraftPlan) else draft.heads.name


def write_engine_head(
    draft: HeadPlan,
    precision: EnginePrecision,
    limits: Limits,
    scratch: Path,
    *,
    target_vocab: int,
) -> EngineHead:
    """Its graphs, in `scratch`. Raises BuildError."""
    if isinstance(draft, EagleDraftPlan):
        return write_eagle_head(draft, precision, limits, scratch, target_vocab=target_vocab)
    return write_medusa_heads(draft, precision, limits, scratch, target_vocab=target_vocab)
