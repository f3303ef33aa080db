"""One comparison from request to result: load both sides, measure prompt by prompt, sum up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.bench.machine import describe_machine
from runtime.bundle import Bundle
from runtime.errors import EngineError, InvalidRequest
from runtime.executor import EngineOptions
from runtime.latency import LatencyProfile

from ..prompts import PromptSet, TokenizedPrompt, read_prompts, text_of
from .cells import Cell, cells
from .graphs import NonFinite
from .layers import Layers, broken_layers, layer_drift
from .limits import Limits
from .measure import WRITING_K, Measurement
from .paths import Paths, check_lengths
from .positions import Length, Position, lengths, positions
from .records import Record
from .settings import Settings
from .sides import BUNDLE, REFERENCE, Side, check_comparable
from .speed import Speed, speeds
from .verdict import findings, recommendation
from .work import WorkFile

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to compare, on which prompts; `paths` takes texts that an earlier comparison stored."""

    bundle: Bundle
    reference: Bundle
    settings: Settings
    limits: Limits
    prompt_files: tuple[Path, ...] = ()
    limit: int | None = None  # prompts of each category
    paths: Paths = field(default_factory=Paths)
    work: Path  # where records are kept while it runs
    options: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, kw_only=True)
class Result:
    settings: dict[str, Any]
    machine: dict[str, Any]
    sides: dict[str, dict[str, Any]]
    prompts: list[dict[str, Any]]  # with their token ids and texts
    skipped: tuple[str, ...]
    cells: list[Cell]
    positions: list[Position]
    lengths: list[Length]
    speeds: list[Speed]  # empty where a bundle has no latency profile
    first_differences: list[dict[str, Any]]
    layers: Layers
    findings: list[str]
    recommendation: str
    limits: Limits
    failures: list[str]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(self)))}


def compare(
    request: Request,
    on_plan: Callable[[int], None],
    on_record: Callable[[Record], None],
    tell: Callable[[str], None],
) -> Result:
    """Raises an OutriderError for what can't be compared."""
    check_comparable(request.reference, request.bundle)
    check_lengths(request.paths, request.settings.path_tokens)
    prompts = read_prompts(request.prompt_files, request.limit, request.reference, _room(request))
    tell("measuring acceptance and drift, prompt by prompt")
    try:
        records = _records(request, prompts, on_plan, on_record)
    except NonFinite as error:
        raise _located(error) from error
    tell("measuring what each layer's rounding does alone")
    layers = layer_drift(
        request.reference, request.bundle, _layer_tokens(request, prompts), request.options
    )
    return _result(request, prompts, records, layers)


def _located(error: NonFinite) -> EngineError:
    """The same, with the layers whose weights are to blame, where they are."""
    layers = broken_layers(Bundle.load(error.path))
    return EngineError(f"{error} Weights that are not finite: {', '.join(layers) or 'none'}.")


def _room(request: Request) -> int:
    """The longest prompt: behind it come a text and one round."""
    behind = _rows_behind(request.settings)
    sides = (request.reference, request.bundle)
    if _window(request) < 1:
        raise InvalidRequest(
            f"--tokens: received {request.settings.tokens}. Expected texts that fit the drafts' "
            f"caches with a round behind them; at most {_window(request) + behind} rows are there."
        )
    for side in sides:
        most = side.manifest.limits.max_draft_tokens
        if request.settings.k > most:
            raise InvalidRequest(
                f"-k: received {request.settings.k}. Expected at most {most}, what {side.path} "
                "was built for."
            )
    return min(side.manifest.limits.max_context for side in sides) - behind


def _window(request: Request) -> int:
    """Tokens of a prompt that both drafts have room for."""
    cards = [side.manifest.draft for side in (request.reference, request.bundle)]
    rows = min(card.cache.max_context for card in cards if card is not None)
    return rows - _rows_behind(request.settings)


def _rows_behind(settings: Settings) -> int:
    """Rows of a cache behind a prompt: a text, and the longest round that begins at its end."""
    return settings.path_tokens + max(settings.k, WRITING_K)


def _records(
    request: Request,
    prompts: PromptSet,
    on_plan: Callable[[int], None],
    on_record: Callable[[Record], None],
) -> list[Record]:
    """In the order of prompts and temperatures; what the work file has is not measured again."""
    work = WorkFile(request.work, _belongs_to(request))
    keys = [(p, t) for p in prompts.prompts for t in request.settings.temperatures]
    missing = [(p, t) for p, t in keys if (p.id, t) not in work.records]
    on_plan(len(missing))
    if missing:
        measurement, writes_freely = _measurement(request), _free_writers(request, prompts)
        for prompt, temperature in missing:
            path = request.paths.of(prompt, temperature)
            work.add(measurement.record(prompt, temperature, path, writes_freely))
            on_record(work.records[prompt.id, temperature])
    return [work.records[p.id, t] for p, t in keys]


def _measurement(request: Request) -> Measurement:
    bundles = {REFERENCE: request.reference, BUNDLE: request.bundle}
    window = _window(request)
    sides = {name: Side(b, request.options, window) for name, b in bundles.items()}
    return Measurement(sides, request.settings, request.reference.manifest.eos_token_ids)


def _free_writers(request: Request, prompts: PromptSet) -> Callable[[TokenizedPrompt], bool]:
    """The first prompt of each category, then the second ones, and so on."""
    ranks: dict[str, int] = {}
    ranked = []
    for prompt in prompts.prompts:
        ranks[prompt.category] = ranks.get(prompt.category, 0) + 1
        ranked.append((ranks[prompt.category], prompt.id))
    ordered = sorted(ranked, key=lambda item: item[0])  # stable: categories in their order
    chosen = {id_ for _, id_ in ordered[: request.settings.free_prompts]}
    return lambda prompt: prompt.id in chosen


def _belongs_to(request: Request) -> dict[str, Any]:
    """What a record depends on, but for its prompt's tokens, which come from these files."""
    sides = {
        n: _identity(b) for n, b in (("reference", request.reference), ("bundle", request.bundle))
    }
    settings = dataclasses.asdict(request.settings)
    settings["temperatures"] = list(request.settings.temperatures)
    files = [str(path) for path in request.prompt_files]
    return {
        "schema": SCHEMA,
        **sides,
        "settings": settings,
        "prompts": files,
        "paths": request.paths.digest,
    }


def _identity(bundle: Bundle) -> dict[str, str]:
    return {name: record.sha256 for name, record in sorted(bundle.manifest.files.items())}


def _layer_tokens(request: Request, prompts: PromptSet) -> list[int]:
    """The first prompts' tokens, as much as was asked for."""
    joined = [token for prompt in prompts.prompts for token in prompt.tokens]
    return joined[: min(request.settings.layer_tokens, _room(request))]


def _result(
    request: Request, prompts: PromptSet, records: Sequence[Record], layers: Layers
) -> Result:
    seed = request.settings.seed
    found, spans = cells(records, seed), lengths(records, seed)
    rates = _speeds(request, records)
    precisions = {
        n: _precisions(b) for n, b in ((REFERENCE, request.reference), (BUNDLE, request.bundle))
    }
    return Result(
        settings=_described_settings(request),
        machine=describe_machine(request.options.threads),
        sides={
            n: _described(b) for n, b in ((REFERENCE, request.reference), (BUNDLE, request.bundle))
        },
        prompts=_described_prompts(prompts, records),
        skipped=prompts.skipped,
        cells=found,
        positions=positions(records, seed),
        lengths=spans,
        speeds=rates,
        first_differences=_first_differences(request, records),
        layers=layers,
        findings=[*findings(records, found, request.reference, request.bundle), *layers.findings()],
        recommendation=recommendation(found, spans, rates, precisions, request.limits.max_kl),
        limits=request.limits,
        failures=request.limits.failures(found),
    )


def _speeds(request: Request, records: Sequence[Record]) -> list[Speed]:
    reports = {REFERENCE: request.reference.latency, BUNDLE: request.bundle.latency}
    profiles = {n: LatencyProfile.from_report(r) for n, r in reports.items() if r is not None}
    return speeds(records, profiles) if len(profiles) == len(reports) else []


def _precisions(bundle: Bundle) -> tuple[str, str]:
    draft = bundle.manifest.draft
    return bundle.manifest.target.precision, draft.precision if draft else "none"


def _described(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    target, draft = _precisions(bundle)
    return {
        "name": bundle.path.name,
        "target": manifest.target.name,
        "target_sha256": manifest.target.sha256,
        "target_precision": target,
        "draft": manifest.draft.name if manifest.draft else "none",
        "draft_precision": draft,
        "target_bytes": _weights(bundle, "target"),
        "draft_bytes": _weights(bundle, "draft"),
        "versions": manifest.versions,
    }


def _weights(bundle: Bundle, graph: str) -> int:
    files = bundle.manifest.files
    return sum(r.bytes for name, r in files.items() if name.startswith(f"onnx/{graph}."))


def _described_settings(request: Request) -> dict[str, Any]:
    return {
        **dataclasses.asdict(request.settings),
        "path_tokens": request.settings.path_tokens,
        "prompts": [path.name for path in request.prompt_files] or ["default"],
        "limit": request.limit,
    }


def _described_prompts(prompts: PromptSet, records: Sequence[Record]) -> list[dict[str, Any]]:
    paths: dict[str, dict[str, list[int]]] = {}
    for record in records:
        paths.setdefault(record.prompt, {})[repr(record.temperature)] = list(record.path)
    return [
        {"id": p.id, "category": p.category, "tokens": list(p.tokens), "paths": paths[p.id]}
        for p in prompts.prompts
    ]


def _first_differences(request: Request, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Greedy text alone: until its first difference both targets read the same tokens."""
    text = text_of(request.reference)
    return [
        {
            "prompt": record.prompt,
            "category": record.category,
            "text_tokens": len(record.path),
            **(
                {"position": None}
                if (flip := record.first_flip) is None
                else {
                    "position": flip.position,
                    "reference": text.decode([flip.reference_token]),
                    "bundle": text.decode([flip.bundle_token]),
                    "margin": flip.margin,
                }
            ),
        }
        for record in records
        if record.temperature == 0
    ]
