"""`python -m runtime bench`: the command line of the deployment benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..executor import EngineOptions
from ..sampling import SamplingParams
from .plan import parse_draft_lengths
from .prompts import TASKS, load_prompts
from .report import print_result
from .session import Settings, run_session
from .summary import Sample

PIPED_WIDTH = 160
EXAMPLE = "Example: python -m runtime bench build/demo --limit 1 --repeats 1 --max-tokens 32"


def bench_command(
    bundles: Annotated[list[Path], typer.Argument(help="Bundles, measured in one run.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines, .gz allowed: prompt, messages or turns. May be repeated."),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help=f"Named prompt sets, comma-separated: {', '.join(TASKS)}.")
    ] = "",
    draft_lengths: Annotated[
        str | None,
        typer.Option(
            "-k", help="Drafts, as 1,2,4,auto,4x2x1,dynamic:16; plain decoding always runs."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens an answer may have.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each category.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every request.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end token.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Figures are medians over these.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON as the last line of stdout, tables to stderr.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="A folder for bench.json, samples.jsonl and plots.")
    ] = None,
) -> None:
    """Measure speed and acceptance of bundles on this machine.

    Plain decoding, each draft length and the automatic choice run interleaved over all prompts:
    tokens per second, time to the first token, acceptance, where a round's time goes, and what
    the runtime adds to the bare engine.
    """
    settings = Settings(
        bundles=tuple(bundles),
        draft_lengths=None if draft_lengths is None else parse_draft_lengths(draft_lengths),
        params=SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos
        ),
        repeats=repeats,
        options=EngineOptions(threads=threads),
    )
    chosen = load_prompts(prompts or [], [t for t in tasks.split(",") if t], limit)
    with _progress() as progress:
        task = progress.add_task("measuring", total=None)

        def on_sample(sample: Sample) -> None:
            contestant = sample.run.contestant
            progress.update(task, advance=1, description=f"{contestant.bundle} {contestant.label}")

        result = run_session(
            settings, chosen, lambda runs: progress.update(task, total=runs), on_sample
        )
    if out is not None:
        result.write(out)
    print_result(_console(stderr=as_json), result)
    if as_json:
        typer.echo(json.dumps(result.as_dict(), ensure_ascii=False))


def _console(stderr: bool) -> Console:
    """As wide as the terminal; wide enough for every table where there is none."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PIPED_WIDTH)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal's stderr, nothing where it is piped."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        yield p
