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
from .model_draft import ModelDraftPlan
from .ngram_draft import NgramDraftPlan
from .ngram_plus import NgramPlusPlan
from .precision import precision
from .retokenized_draft import RetokenizedDraftPlan

NGRAM = "ngram"  # a directory of that name is ./ngram
PLUS = f"{NGRAM}+"


@dataclass(frozen=True, kw_only=True)
class DraftRequest:
    """`--draft` and the options that shape it; None where they weren't given."""

    source: str | None
    precision: str | None
    min_ngram: int | None
    max_ngram: int | None
    retokenize: bool = False
    q_over: QOver = QOver.DRAFT


def open_drafter(
    request: DraftRequest, target: Checkpoint, *, context: int, target_precision: str
) -> DraftPlan | None:
    """Check a drafter against its target, whose context is `context`; None where none is asked for.

    Raises CheckpointError, and BuildError for an option that another kind of drafter takes.
    """
    bounds = {"--min-ngram": request.min_ngram, "--max-ngram": request.max_ngram}
    if request.source is not None and request.source.startswith(PLUS):
        return _open_plus(request, target, context=context, target_precision=target_precision)
    if request.source in (None, NGRAM):
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
    chosen = precision(request.precision or target_precision, "--draft-precision")
    if request.retokenize:
        return RetokenizedDraftPlan.open(
            request.source, target, target_context=context, precision=chosen
        )
    return ModelDraftPlan.open(
        request.source,
        target,
        target_context=context,
        precision=chosen,
        q_over=request.q_over,
    )


def _open_plus(
    request: DraftRequest, target: Checkpoint, *, context: int, target_precision: str
) -> DraftPlan:
    rest = (request.source or "").removeprefix(PLUS)
    lookup = NgramDraftPlan.of(
        min_ngram=request.min_ngram, max_ngram=request.max_ngram, context=context
    )
    behind = replace(request, source=rest, min_ngram=None, max_ngram=None, q_over=QOver.TARGET)
    other = None
    if rest not in ("", "none", NGRAM) and not rest.startswith(PLUS):
        other = open_drafter(behind, target, context=context, target_precision=target_precision)
    if other is None:
        raise BuildError(
            f"--draft {request.source}: received no draft model behind the lookup. Expected "
            f"{PLUS}PATH, a draft's directory or hub id; --draft {NGRAM} looks up alone."
        )
    return NgramPlusPlan(lookup=lookup, other=other)


def _refuse(options: Mapping[str, object], expected: str) -> None:
    given = [f"{flag} {value}".rstrip() for flag, value in options.items() if value is not None]
    if given:
        raise BuildError(f"{given[0]}: received it without its drafter. Expected {expected}.")
