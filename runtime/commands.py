"""What the command lines of all packages share."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from .errors import OutriderError


class Commands(TyperGroup):
    """A group whose errors, raised on purpose, are one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:  # typer's own click or the public one, by version
        try:
            return super().invoke(ctx)
        except OutriderError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_status) from error
