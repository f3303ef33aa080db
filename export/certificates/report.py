"""What a certificate says: the claim, whether it holds, and the figures that show it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """`status` is passed, failed or skipped; a failure's reason says what was found."""

    name: str
    claim: str
    status: str
    reason: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status == "failed"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def judged(name: str, claim: str, figures: Figures, faults: list[str]) -> Certificate:
    """Failed where there are faults, passed otherwise."""
    return Certificate(
        name=name,
        claim=claim,
        status="failed" if faults else "passed",
        reason="; ".join(faults),
        figures=figures,
    )


def skipped(name: str, claim: str, reason: str) -> Certificate:
    return Certificate(name=name, claim=claim, status="skipped", reason=reason)
