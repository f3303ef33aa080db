"""One comparison from request to result: load both sides, measure prompt by prompt, sum up."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from runtime.bundle import Bundle
from runtime.errors import EngineError

from ..prompts import PromptSet, TokenizedPrompt, read_prompts
from .graphs import NonFinite
from .layers import broken_layers, draft_layers, target_layers
from .measure import Measurement
from .opened import OpenBundle
from .paths import check_lengths
from .records import Record
from .request import Request, check_limits, room
from .result import SCHEMA, Result, make_result
from .sides import BUNDLE, REFERENCE, Drafts, Side, check_comparable
from .work import WorkFile
from .workers import measured, shared


def compare(
    request: Request,
    on_plan: Callable[[int], None],
    on_record: Callable[[Record], None],
    tell: Callable[[str], None],
) -> Result:
    """Raises an OutriderError for what can't be compared."""
    check_comparable(request.reference, request.bundle)
    check_limits(request)
    check_lengths(request.paths, request.settings.path_tokens)
    prompts = read_prompts(request.prompt_files, request.limit, request.reference, room(request))
    if request.no_acceptance:
        tell(f"acceptance is not compared: {request.no_acceptance}")
    tell("measuring, prompt by prompt")
    try:
        records = _records(request, prompts, on_plan, on_record)
    except NonFinite as error:
        raise _located(error) from error
    tell("measuring what each layer's rounding does alone")
    read = (request.reference, request.bundle, _layer_tokens(request, prompts), request.options)
    return make_result(request, prompts, records, target_layers(*read), draft_layers(*read))


def _located(error: NonFinite) -> EngineError:
    """The same, with the layers whose weights are to blame, where they are."""
    layers = broken_layers(Bundle.load(error.path))
    return EngineError(f"{error} Weights that are not finite: {', '.join(layers) or 'none'}.")


def _records(
    request: Request,
    prompts: PromptSet,
    on_plan: Callable[[int], None],
    on_record: Callable[[Record], None],
) -> list[Record]:
    """In the order of prompts and temperatures; what the work file has is not measured again."""
    work = WorkFile(request.work, _belongs_to(request, prompts))
    keys = [(p, t) for p in prompts.prompts for t in request.settings.temperatures]
    missing = list(dict.fromkeys(p for p, t in keys if (p.id, t) not in work.records))
    on_plan(len(missing) * len(request.settings.temperatures))
    if missing:
        writes_freely = _free_writers(request, prompts)

        def measure(one: Measurement, prompt: TokenizedPrompt) -> list[Record]:
            paths = ((t, request.paths.of(prompt, t)) for t in request.settings.temperatures)
            return [one.record(prompt, t, path, writes_freely) for t, path in paths]

        for records in measured(_measurements(request), missing, measure):
            for record in records:
                if (record.prompt, record.temperature) not in work.records:
                    work.add(record)
                on_record(record)
    return [work.records[p.id, t] for p, t in keys]


def _measurements(request: Request) -> list[Measurement]:
    """One a worker."""
    workers, options = shared(request.options)
    bundles = {REFERENCE: request.reference, BUNDLE: request.bundle}
    opened = {name: OpenBundle(bundle, options) for name, bundle in bundles.items()}
    return [_measurement(request, opened) for _ in range(workers)]


def _measurement(request: Request, opened: Mapping[str, OpenBundle]) -> Measurement:
    sides = {name: Side(bundle.target()) for name, bundle in opened.items()}
    drafting = {} if request.no_acceptance else opened
    drafts = Drafts(drafting, sides, request.settings.k)
    return Measurement(sides, drafts, request.settings, request.reference.manifest.eos_token_ids)


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


def _belongs_to(request: Request, prompts: PromptSet) -> dict[str, Any]:
    """All that a record depends on."""
    settings = dataclasses.asdict(request.settings)
    settings["temperatures"] = list(request.settings.temperatures)
    del settings["layer_tokens"]
    read = json.dumps([[p.id, p.category, p.tokens] for p in prompts.prompts])
    return {
        "schema": SCHEMA,
        REFERENCE: _identity(request.reference),
        BUNDLE: _identity(request.bundle),
        "settings": settings,
        "prompts": hashlib.sha256(read.encode()).hexdigest(),
        "paths": request.paths.digest,
    }


def _identity(bundle: Bundle) -> dict[str, str]:
    return {name: record.sha256 for name, record in sorted(bundle.manifest.files.items())}


def _layer_tokens(request: Request, prompts: PromptSet) -> list[int]:
    """The first prompts' tokens, as much as was asked for."""
    joined = [token for prompt in prompts.prompts for token in prompt.tokens]
    return joined[: min(request.settings.layer_tokens, room(request))]
