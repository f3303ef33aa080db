"""What a build was asked for, and whether it can be done: checked before anything slow begins."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from engines.tensorrt.build import BuildOptions, check_targets, check_types
from engines.tensorrt.package import load
from runtime.errors import BuildError
from runtime.manifest import ENGINE_LIBRARIES, Limits

from . import gates
from .calibrated import (
    CalibrationPlan,
    CalibrationRequest,
    plan_calibration,
    refuse_without_recipe,
)
from .checkpoint import Checkpoint, open_checkpoint
from .draft_plan import DraftPlan
from .drafters import LAYER_SKIP, DraftRequest, open_drafter
from .eagle_draft import EagleDraftPlan
from .engine_bundle import EngineBuild, refuse_draft
from .engine_precision import (
    engine_draft_precision,
    engine_precision,
    refuse_without_engines,
)
from .features import refuse_unproven, refuse_unsupported
from .fidelity_gate import FidelityGate
from .limits import check_batch, check_draft_tokens, check_tree_nodes, target_context
from .medusa_draft import MedusaDraftPlan
from .model_draft import ModelDraftPlan
from .precision import Precision, precision

BACKENDS = ("onnxruntime", *ENGINE_LIBRARIES)
DRAFTS_BESIDE_ENGINES = "int8"  # on ONNX Runtime's CPU


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What `python -m export build` was asked for; limits of None take the default."""

    target: str
    draft: str | None  # None builds a bundle that only decodes plainly
    out: Path
    backend: str = "onnxruntime"
    compute_capabilities: tuple[int, ...] = ()  # of tensorrt-rtx; empty: all that it builds for
    draft_backend: str | None = None  # None: where the target runs
    precision: str = "int8"
    draft_precision: str | None = None  # None: the target's
    rows_alike: bool = True  # where the precision allows it
    max_batch: int = 1
    max_context: int | None = None
    max_draft_tokens: int = 8
    max_tree_nodes: int = 0  # 0: chains only
    min_ngram: int | None = None  # of --draft ngram alone
    max_ngram: int | None = None
    skip_layers: str | None = None  # of --draft layer-skip alone
    search_seconds: float | None = None
    retokenize: bool = False  # a draft of another tokenizer
    gate: FidelityGate | None = None  # None: how far it is from a reference isn't judged
    calibration: CalibrationRequest = field(default_factory=CalibrationRequest)


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """A request that was checked against its checkpoints."""

    target: Checkpoint
    draft: DraftPlan | None
    precision: Precision  # of what runs on ONNX Runtime
    limits: Limits
    calibration: CalibrationPlan | None  # of a recipe that reads text
    engines: EngineBuild | None  # None: ONNX Runtime

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.taps if self.draft else ()


def plan_build(request: BuildRequest) -> BuildPlan:
    """Raises CheckpointError and BuildError."""
    if request.backend not in BACKENDS:
        raise BuildError(
            f"--backend: received {request.backend!r}. Expected one of {', '.join(BACKENDS)}."
        )
    batch = check_batch(request.max_batch)
    engines = engine_build(request)
    chosen: Precision = precision(DRAFTS_BESIDE_ENGINES if engines else request.precision)
    chosen = replace(chosen, rows_alike=chosen.rows_alike and request.rows_alike)
    recipe = engines.precision.recipe if engines else chosen
    refuse_without_recipe(request.calibration, request.precision, recipe)
    target = open_checkpoint(request.target)
    target.text_files()  # raises here rather than after minutes
    context = target_context(request.max_context, target.config, target.name)
    calibration = None
    if recipe is not None and recipe.calibrated:
        calibration = plan_calibration(request.calibration, target, recipe, context)
        if engines:
            engines = engines.calibrated(calibration.precision)
        else:
            chosen = calibration.precision
    asked = _draft_request(request)
    if engines and engines.draft_backend != "onnxruntime":
        asked = replace(asked, precision=None)  # it is an engine's, and checked as one
    draft = open_drafter(asked, target, context=context, target_precision=chosen)
    refuse_unsupported(target.config, context)
    if chosen.int8_caches:
        _refuse_f32_caches(request, chosen)
    refuse_unproven(target.config, target.eager_bytes(), gates.available_bytes())
    if request.gate is not None and request.gate.drop_asked:
        _refuse_drop(request, draft)
    k = check_draft_tokens(request.max_draft_tokens, draft.context) if draft else 0
    if draft and draft.most_drafts is not None:
        k = min(k, draft.most_drafts)
    plan = BuildPlan(
        target=target,
        draft=draft,
        precision=chosen,
        engines=engines,
        limits=Limits(
            max_batch=batch,
            max_context=context,
            max_draft_tokens=k,
            max_tree_nodes=check_tree_nodes(request.max_tree_nodes, draft, context),
        ),
        calibration=calibration,
    )
    if engines:
        refuse_draft(draft, plan.limits, engines)
    return plan


def _refuse_f32_caches(request: BuildRequest, chosen: Precision) -> None:
    """Raises BuildError for what isn't built over caches of 8 bits."""
    if request.max_tree_nodes:
        raise BuildError(
            f"--max-tree-nodes: received {request.max_tree_nodes} with --precision {chosen.name}. "
            "Expected 0: trees aren't verified over caches of 8 bits yet; choose another precision."
        )
    if request.draft == LAYER_SKIP:
        raise BuildError(
            f"--draft: received {LAYER_SKIP} with --precision {chosen.name}. Expected another "
            "drafter: it shares the target's caches, and is tried out on f32 ones alone."
        )


def engine_build(request: BuildRequest) -> EngineBuild | None:
    """What a request asks of engines; None for ONNX Runtime. Raises BuildError, at the door."""
    if request.backend not in ENGINE_LIBRARIES:
        given = {"--compute-capability": request.compute_capabilities or None,
                 "--draft-backend": request.draft_backend}  # fmt: skip
        for flag, value in given.items():
            if value is not None and value != request.backend:
                raise BuildError(
                    f"{flag}: received it with --backend {request.backend}. Expected a backend of "
                    f"engines: {', '.join(ENGINE_LIBRARIES)}."
                )
        refuse_without_engines(request.precision, "--precision", request.backend)
        refuse_without_engines(request.draft_precision, "--draft-precision", request.backend)
        return None
    draft_backend = request.draft_backend or request.backend
    if draft_backend not in ("onnxruntime", request.backend):
        raise BuildError(
            f"--draft-backend: received {draft_backend!r}. Expected {request.backend} or "
            "onnxruntime."
        )
    if request.gate is not None:
        raise BuildError(
            f"--gate: received it with --backend {request.backend}. Expected --backend "
            "onnxruntime: a gate decodes, which engines do on a GPU alone."
        )
    check_targets(load(request.backend), request.compute_capabilities)
    own = draft_backend == request.backend
    target = engine_precision(request.precision)
    draft_name = request.draft_precision if own else None
    chosen = {
        "--precision": target,
        "--draft-precision": engine_draft_precision(draft_name or target.for_drafts),
    }
    for flag, one in chosen.items():
        if one.weights is not None:
            check_types(flag, [one.weights.dtype], request.compute_capabilities)
    return EngineBuild(
        backend=request.backend,
        precision=chosen["--precision"],
        draft_precision=chosen["--draft-precision"],
        options=BuildOptions(compute_capabilities=request.compute_capabilities),
        draft_backend=draft_backend,
    )


def _draft_request(request: BuildRequest) -> DraftRequest:
    return DraftRequest(
        source=request.draft,
        precision=request.draft_precision,
        min_ngram=request.min_ngram,
        max_ngram=request.max_ngram,
        skip_layers=request.skip_layers,
        search_seconds=request.search_seconds,
        max_draft_tokens=request.max_draft_tokens,
        retokenize=request.retokenize,
    )


def _refuse_drop(request: BuildRequest, draft: DraftPlan | None) -> None:
    """Raises BuildError where there is no acceptance to compare, before anything slow."""
    if not isinstance(draft, ModelDraftPlan | EagleDraftPlan | MedusaDraftPlan):
        raise BuildError(
            f"--max-acceptance-drop: received it with --draft {request.draft or 'none'}. Expected "
            "a draft model or a head, whose acceptance can be compared; leave the limit out, and "
            "--gate judges the target alone."
        )
