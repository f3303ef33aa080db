"""The command line: `python -m calibration …`. Results on stdout, tables and progress on stderr."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from runtime.commands import Commands

from .comparison.command import EXAMPLE, compare_command

app = typer.Typer(
    cls=Commands,
    help="What quantization does to a target and its draft.",
    epilog=EXAMPLE,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what is done.")] = False,
) -> None:
    """What quantization does to a target and its draft."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING)


app.command("compare", epilog=EXAMPLE)(compare_command)
