"""`python -m calibration compare`: the command line of the fidelity report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runtime.bundle import Bundle
from runtime.executor import EngineOptions

from .limits import Limits
from .page import write_page
from .paths import Paths
from .records import Record
from .reference import Checkpoints, load_reference
from .request import Request
from .result import Result
from .run import compare
from .settings import Settings, parse_temperatures
from .tables import print_result

PIPED_WIDTH = 160
EXAMPLE = "Example: python -m calibration compare build/demo --reference build/demo-fp32 --limit 2"


def compare_command(
    bundle: Annotated[Path, typer.Argument(help="The bundle's directory.")],
    reference: Annotated[
        str, typer.Option(help="A bundle, or a checkpoint that is built to fp32 for this.")
    ],
    reference_draft: Annotated[
        str | None, typer.Option(help="The draft to build a reference checkpoint with.")
    ] = None,
    cache: Annotated[
        Path, typer.Option(help="Where a reference built from a checkpoint is kept.")
    ] = Path("~/.cache/outrider"),
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines: prompt, messages or turns. Default: a set of our own."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each category.")] = None,
    tokens: Annotated[
        int, typer.Option(help="Of text for each prompt, shared by the temperatures.")
    ] = 128,
    temperatures: Annotated[str, typer.Option(help="With commas between.")] = "0,0.7,1",
    k: Annotated[int, typer.Option("-k", help="Tokens drafted a round.")] = 4,
    rounds: Annotated[int, typer.Option(help="For each prompt and temperature.")] = 2,
    free_prompts: Annotated[
        int, typer.Option(help="Answered by each of the four pairs itself, too.")
    ] = 2,
    layer_tokens: Annotated[
        int, typer.Option(help="To measure each layer on; 0 leaves layers out.")
    ] = 32,
    paths: Annotated[
        Path | None, typer.Option(help="A compare.json: read its texts, don't write new ones.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of texts, rounds and intervals.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    max_acceptance_drop: Annotated[
        float | None, typer.Option(help="Exit 1 where a cell's acceptance falls by more.")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Exit 1 where a cell's KL is more, nats a token.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="For compare.json and compare.html. Default: BUNDLE/reports/fidelity."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole result as one line.")] = False,
) -> None:
    """Compare a bundle with a reference: acceptance, drift, where they come from, what to run.

    Both read the text that the reference writes; rounds of all four pairs of target and draft begin
    at the same places of it with the same random numbers. Interrupted, it goes on where it stopped.
    """
    settings = Settings(
        tokens=tokens,
        temperatures=parse_temperatures(temperatures),
        k=k,
        rounds=rounds,
        free_prompts=free_prompts,
        layer_tokens=layer_tokens,
        seed=seed,
    )
    limits = Limits(max_acceptance_drop=max_acceptance_drop, max_kl=max_kl)
    console = _console()
    loaded = Bundle.load(bundle)
    built = Checkpoints(target=reference, draft=reference_draft, cache=cache.expanduser())
    folder = out or bundle / "reports" / "fidelity"
    with _progress(console) as progress:
        task = progress.add_task("comparing", total=None)

        def on_record(record: Record) -> None:
            progress.update(task, advance=1, description=record.category)

        def tell(text: str) -> None:
            progress.console.print(f"· {text}", highlight=False)

        request = Request(
            bundle=loaded,
            reference=load_reference(loaded, built, tell),
            settings=settings,
            limits=limits,
            prompt_files=tuple(prompts or ()),
            limit=limit,
            paths=Paths.read(paths) if paths else Paths(),
            work=folder / "work.jsonl",
            options=EngineOptions(threads=threads, spin=False),
        )
        result = compare(request, lambda n: progress.update(task, total=n), on_record, tell)
    _finish(console, result, folder, as_json=as_json)


def _finish(console: Console, result: Result, folder: Path, *, as_json: bool) -> None:
    """Write, show, and exit 1 where a limit was passed."""
    as_dict = result.as_dict()
    text = json.dumps(as_dict, ensure_ascii=False)
    (folder / "compare.json").write_text(text + "\n", encoding="utf-8")
    write_page(folder / "compare.html", as_dict)
    print_result(console, result)
    console.print(f"written: {folder / 'compare.json'}, {folder / 'compare.html'}")
    for failure in result.failures:
        typer.echo(f"error: {failure}", err=True)
    typer.echo(text if as_json else result.recommendation)
    if result.failures:
        raise typer.Exit(1)


def _console() -> Console:
    """On stderr, as wide as the terminal; wide enough for every table where there is none."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=PIPED_WIDTH)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar on a terminal, nothing where it is piped."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield progress
