"""A comparison's result: figures from records, and what they were taken with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.bench.machine import describe_machine
from runtime.bundle import Bundle
from runtime.latency import LatencyProfile

from ..prompts import PromptSet, text_of
from .cells import Cell, cells
from .layers import Layers
from .limits import Limits
from .positions import Length, Position, lengths, positions
from .records import Record
from .request import Request
from .sides import BUNDLE, REFERENCE
from .speed import Speed, speeds
from .verdict import findings, recommendation

SCHEMA = 1


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
    layers: Layers  # the target's
    draft_layers: Layers
    findings: list[str]
    recommendation: str
    limits: Limits
    failures: list[str]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(self)))}


def make_result(
    request: Request,
    prompts: PromptSet,
    records: Sequence[Record],
    target: Layers,
    draft: Layers,
) -> Result:
    """target, draft: what each layer of them does."""
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
        layers=target,
        draft_layers=draft,
        findings=[
            *findings(records, found, request.reference, request.bundle),
            *target.findings("target"),
            *draft.findings("draft"),
        ],
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
