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


def room(request: Request) -> int:
    """The longest prompt: behind it come a text and one round."""
    behind = _rows_behind(request.settings)
    sides = (request.reference, request.bundle)
    if window(request) < 1:
        raise InvalidRequest(
            f"--tokens: received {request.settings.tokens}. Expected texts that fit the drafts' "
            f"caches with a round behind them; at most {window(request) + behind} rows are there."
        )
    for side in sides:
        most = side.manifest.limits.max_draft_tokens
        if request.settings.k > most:
            raise InvalidRequest(
                f"-k: received {request.settings.k}. Expected at most {most}, what {side.path} "
                "was built for."
            )
    return min(side.manifest.limits.max_context for side in sides) - behind


def window(request: Request) -> int:
    """Tokens of a prompt that both drafts have room for."""
    cards = [side.manifest.draft_model for side in (request.reference, request.bundle)]
    rows = min(card.cache.max_context for card in cards if card is not None)
    return rows - _rows_behind(request.settings)


def _rows_behind(settings: Settings) -> int:
    """Rows of a cache behind a prompt: a text, and the longest round that begins at its end."""
    return settings.path_tokens + max(settings.k, WRITING_K)
