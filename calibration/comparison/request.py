"""What a comparison is asked to do, and whether prompts, texts and rounds fit both bundles."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from runtime.bundle import Bundle
from runtime.errors import InvalidRequest
from runtime.executor import EngineOptions

from .limits import Limits
from .paths import Paths
from .settings import Settings
from .sides import why_no_acceptance
from .writing import WRITING_K


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

    @property
    def no_acceptance(self) -> str:
        """Why drafts are left out; empty where they are compared."""
        return why_no_acceptance(self.reference, self.bundle)


def check_limits(request: Request) -> None:
    """Raises InvalidRequest for a limit of something that can't be measured."""
    drop, reason = request.limits.max_acceptance_drop, request.no_acceptance
    if drop is not None and reason:
        raise InvalidRequest(
            f"--max-acceptance-drop: received {drop:g} where {reason}. Expected drafts that can be "
            "tried on both targets; compare such bundles, or leave the limit out."
        )


def room(request: Request) -> int:
    """The longest prompt: behind it come a text and one round."""
    sides, settings = (request.reference, request.bundle), request.settings
    for side in () if request.no_acceptance else sides:
        most = side.manifest.limits.max_draft_tokens
        if settings.k > most:
            raise InvalidRequest(
                f"-k: received {settings.k}. Expected at most {most}, what {side.path} was built "
                "for."
            )
    behind = settings.path_tokens + max(settings.k, WRITING_K)
    most = min(side.manifest.limits.max_context for side in sides)
    if most <= behind:
        raise InvalidRequest(
            f"--tokens: received {settings.tokens}. Expected texts that fit the caches "
            f"with a prompt before and a round behind them: at most {most} tokens together."
        )
    return most - behind
