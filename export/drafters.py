"""Every kind of drafter that a build knows, by what `--draft` says.

A new kind is a case here, and in runtime/drafters.py, which loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.errors import BuildError

from .checkpoint import Checkpoint
from .draft_plan import DraftPlan
from .draft_vocabulary import QOver
from .drafter_kind import DrafterKind, read_kind
from .eagle_draft import EagleDraftPlan
from .layer_skip_draft import LayerSkipPlan
from .medusa_draft import MedusaDraftPlan
from .model_draft import ModelDraftPlan
from .ngram_draft import NgramDraftPlan
from .ngram_plus import NgramPlusPlan
from .precision import Precision, draft_precision
from .retokenized_draft import RetokenizedDraftPlan

NGRAM = "ngram"  # a directory of that name is ./ngram
PLUS = f"{NGRAM}+"
LAYER_SKIP = "layer-skip"


@dataclass(frozen=True, kw_only=True)
class DraftRequest:
    """`--draft` and the options that shape it; None where they weren't given."""

    source: str | None
    precision: str | None
    min_ngram: int | None
    max_ngram: int | None
    skip_layers: str | None
    search_seconds: float | None
    max_draft_tokens: int
    retokenize: bool = False
    q_over: QOver = QOver.DRAFT


def open_drafter(
    request: DraftRequest, target: Checkpoint, *, context: int, target_precision: Precision
) -> DraftPlan | None:
    """Check a drafter against its target, whose context is `context`; None where none is asked for.

    Raises CheckpointError, and BuildError for an option that another kind of drafter takes.
    """
    bounds = {"--min-ngram": request.min_ngram, "--max-ngram": request.max_ngram}
    layers = {"--skip-layers": request.skip_layers, "--search-seconds": request.search_seconds}
    if request.source != LAYER_SKIP:
        _refuse(layers, f"--draft {LAYER_SKIP}, which alone leaves layers out")
    if request.source is not None and request.source.startswith(PLUS):
        return _open_plus(request, target, context=context, target_precision=target_precision)
    if request.source in (None, NGRAM, LAYER_SKIP):
        asked = {"--retokenize": "" if request.retokenize else None}
        _refuse(asked, "--draft PATH, a model whose tokenizer isn't the target's")
    if request.source == NGRAM:
        _refuse({"--draft-precision": request.precision}, "a draft model: a lookup has no weights")
        return NgramDraftPlan.of(
            min_ngram=request.min_ngram, max_ngram=request.max_ngram, context=context
        )
    _refuse(bounds, f"--draft {NGRAM}, which alone has such bounds")
    if request.source is None:
        return None
    if request.source == LAYER_SKIP:
        _refuse(
            {"--draft-precision": request.precision}, "a draft model: here drafts are the target's"
        )
        return LayerSkipPlan.of(
            target,
            precision=target_precision,
            context=context,
            skip_layers=request.skip_layers,
            search_seconds=request.search_seconds,
            max_draft_tokens=request.max_draft_tokens,
        )
    return _open_weights(request, target, context=context, target_precision=target_precision)


def _open_weights(
    request: DraftRequest, target: Checkpoint, *, context: int, target_precision: Precision
) -> DraftPlan:
    """A drafter with weights of its own; what it is, its files say."""
    source = request.source or ""
    default = target_precision.for_drafts or target_precision.name
    chosen = draft_precision(request.precision or default)
    if request.retokenize:
        return RetokenizedDraftPlan.open(source, target, target_context=context, precision=chosen)
    match read_kind(source):
        case DrafterKind.EAGLE:
            return EagleDraftPlan.open(
                source, target, target_context=context, precision=chosen, q_over=request.q_over
            )
        case DrafterKind.MEDUSA:
            return MedusaDraftPlan.open(
                source,
                target,
                target_context=context,
                precision=chosen,
                max_draft_tokens=request.max_draft_tokens,
                q_over=request.q_over,
            )
        case DrafterKind.MODEL:
            return ModelDraftPlan.open(
                source, target, target_context=context, precision=chosen, q_over=request.q_over
            )


def _open_plus(
    request: DraftRequest, target: Checkpoint, *, context: int, target_precision: Precision
) -> DraftPlan:
    rest = (request.source or "").removeprefix(PLUS)
    lookup = NgramDraftPlan.of(
        min_ngram=request.min_ngram, max_ngram=request.max_ngram, context=context
    )
    behind = replace(request, source=rest, min_ngram=None, max_ngram=None, q_over=QOver.TARGET)
    other = None
    if rest not in ("", "none", NGRAM, LAYER_SKIP) and not rest.startswith(PLUS):
        other = open_drafter(behind, target, context=context, target_precision=target_precision)
    if other is None:
        raise BuildError(
            f"--draft {request.source}: received no draft model behind the lookup. Expected "
            f"{PLUS}PATH, the directory or hub id of a draft or of heads; --draft {NGRAM} looks up "
            "alone."
        )
    return NgramPlusPlan(lookup=lookup, other=other)


def _refuse(options: Mapping[str, object], expected: str) -> None:
    given = [f"{flag} {value}".rstrip() for flag, value in options.items() if value is not None]
    if given:
        raise BuildError(f"{given[0]}: received it without its drafter. Expected {expected}.")
