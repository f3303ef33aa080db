"""`build --gate`: a bundle that is further from its reference than allowed never gets its name.

The comparison is `python -m calibration compare`'s own, run on the bundle before it is moved into
place; its report stays in the bundle, under reports/fidelity.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from calibration.comparison.cells import ALL
from calibration.comparison.drafting import ComparedDraft
from calibration.comparison.limits import Limits
from calibration.comparison.page import write_page
from calibration.comparison.reference import Checkpoints, load_reference
from calibration.comparison.request import Request
from calibration.comparison.result import Result
from calibration.comparison.run import compare
from calibration.comparison.settings import Settings
from runtime.bundle import Bundle
from runtime.errors import BuildError, GateFailed
from runtime.executor import EngineOptions
from runtime.manifest import Gate

MAX_ACCEPTANCE_DROP = 0.02  # of Σ min(p, q)
MAX_KL = 0.05  # nats a token
CACHE = Path("~/.cache/outrider")
WORK = "work.jsonl"


@dataclass(frozen=True, kw_only=True)
class FidelityGate:
    """reference: a bundle; None builds the same checkpoints to fp32, once, and keeps that.

    Drafts without an acceptance that could be compared, as lookups, leave the target's drift to
    judge; drop_asked: then a limit of acceptance is a mistake.
    """

    reference: str | None = None
    limits: Limits = field(
        default_factory=lambda: Limits(max_acceptance_drop=MAX_ACCEPTANCE_DROP, max_kl=MAX_KL)
    )
    prompt_files: tuple[Path, ...] = ()  # none: the set that comes with the package
    drop_asked: bool = False
    prompts_a_category: int = 2
    tokens: int = 96  # of text for each prompt

    def check(
        self, bundle: Bundle, target: str, draft: str | None, tell: Callable[[str], None]
    ) -> Gate:
        """Compare, and leave the report in the bundle. Raises GateFailed naming the cells."""
        if not isinstance(bundle.manifest.draft, ComparedDraft):
            draft = None
        source = Checkpoints(target=self.reference or target, draft=draft, cache=CACHE.expanduser())
        reference = load_reference(bundle, source, tell)
        folder = bundle.path / "reports" / "fidelity"
        request = self._request(bundle, reference, folder)
        if request.no_acceptance and not self.drop_asked:
            request = replace(request, limits=replace(self.limits, max_acceptance_drop=None))
        result = compare(request, _ignore, _ignore, tell)
        self._write(result, folder)
        return _judged(result)

    def _request(self, bundle: Bundle, reference: Bundle, folder: Path) -> Request:
        k = min(bundle.manifest.limits.max_draft_tokens, Settings.k)
        return Request(
            bundle=bundle,
            reference=reference,
            settings=Settings(tokens=self.tokens, k=k, free_prompts=0),
            limits=self.limits,
            prompt_files=self.prompt_files,
            limit=self.prompts_a_category,
            work=folder / WORK,
            options=EngineOptions(spin=False),
        )

    def _write(self, result: Result, folder: Path) -> None:
        found = result.as_dict()
        text = json.dumps(found, ensure_ascii=False)
        (folder / "compare.json").write_text(text + "\n", encoding="utf-8")
        write_page(folder / "compare.html", found)
        (folder / WORK).unlink(missing_ok=True)


def fidelity_gate(
    *, asked: bool, reference: str | None, drop: float | None, kl: float | None
) -> FidelityGate | None:
    """What the command line asks for; None: no gate. Raises BuildError for options without it."""
    options = {"--gate-reference": reference, "--max-acceptance-drop": drop, "--max-kl": kl}
    given = [flag for flag, value in options.items() if value is not None]
    if not asked and given:
        raise BuildError(f"{given[0]}: received it without --gate. Expected both, or neither.")
    if not asked:
        return None
    for flag, limit in (("--max-acceptance-drop", drop), ("--max-kl", kl)):
        if limit is not None and not 0 <= limit < float("inf"):
            raise BuildError(f"{flag}: received {limit:g}. Expected 0 or more.")
    limits = Limits(
        max_acceptance_drop=MAX_ACCEPTANCE_DROP if drop is None else drop,
        max_kl=MAX_KL if kl is None else kl,
    )
    return FidelityGate(reference=reference, limits=limits, drop_asked=drop is not None)


def _judged(result: Result) -> Gate:
    if result.failures:
        raise GateFailed(
            f"gate fidelity: {len(result.failures)} cells are beyond the limits. "
            f"{' '.join(result.failures)} Use a higher --precision, or allow more with "
            "--max-acceptance-drop and --max-kl."
        )
    figures: dict[str, float | int | str] = {"prompts": len(result.prompts)}
    for cell in result.cells:
        if cell.category != ALL:
            continue
        change, kl = cell.differences["both"], cell.drift.kl
        if change is not None:
            figures[f"acceptance_change_at_{cell.temperature}"] = change.value
        if kl is not None:
            figures[f"kl_at_{cell.temperature}"] = kl.value
    return Gate(name="fidelity", status="passed", figures=figures)


def _ignore(_: object) -> None:
    return
