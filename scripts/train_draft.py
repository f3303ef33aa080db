#!/usr/bin/env python
"""Distil a small drafter for a target from text which the target wrote.

    python scripts/train_draft.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --text smollm2_selfgen.jsonl.xz --out examples/smollm2-draft --epochs 2

The target first labels the text (``--work`` keeps the labels), then the drafter is fitted to the
labels and measured on held-out conversations. Both phases go on where a killed run stopped.
``--kind`` says what is made: a small model of the target's own layers, an EAGLE-3 head, or Medusa
heads. Progress goes to stderr; the last line of stdout is the result.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from draft_training.chain_figures import ChainFigures
from draft_training.eagle import HeadShape
from draft_training.errors import TrainDraftError
from draft_training.evaluate import Figures
from draft_training.export import Story, check_out
from draft_training.features import store_features, taps
from draft_training.job import Job, prepare
from draft_training.labels import label
from draft_training.recipes import Run, make_eagle, make_medusa, make_model
from draft_training.student import check_layers, choose_layers
from draft_training.training import Cursor, Report, TrainOptions
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

console = Console(stderr=True)
app = typer.Typer(add_completion=False)


class Kind(StrEnum):
    """What to make."""

    MODEL = "model"
    EAGLE3 = "eagle3"
    MEDUSA = "medusa"


class Phase(StrEnum):
    """What to do; two ``label`` shards and a ``train`` may run side by side."""

    ALL = "all"
    LABEL = "label"
    TRAIN = "train"


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"received {text!r}. Expected layer numbers such as 0,1,28,29", param_hint="--layer-ids"
        ) from error


def parse_shard(text: str) -> tuple[int, int]:
    """``"0/2"`` -> (0, 2)."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise typer.BadParameter(
            f"received {text!r}. Expected INDEX/COUNT with INDEX < COUNT, such as 0/2",
            param_hint="--shard",
        )
    return int(index), int(count)


def chosen_layers(target: PreTrainedModel, layers: int, layer_ids: str | None) -> tuple[int, ...]:
    """The layers of a draft model, as the two options say."""
    total = target.config.num_hidden_layers
    return (
        choose_layers(total, layers)
        if layer_ids is None
        else check_layers(total, _parse_ids(layer_ids))
    )


def check_target(target: PreTrainedModel, kind: Kind) -> None:
    """Refuse a target which this kind of head can't read, before hours are spent on it."""
    if kind is not Kind.MODEL:
        taps(target.config.num_hidden_layers)
    if kind is Kind.EAGLE3:
        HeadShape.of(target.config)


def run_labels(job: Job, shard: tuple[int, int], kind: Kind) -> None:
    """Label this shard behind a progress bar; shard 0 makes the features as well."""
    chunks, held_out = job.split.chunks, job.split.held_out
    with Progress(console=console) as bar:
        task = bar.add_task("label")
        label(
            job.target,
            chunks,
            held_out,
            job.vocabulary,
            work=job.work,
            shard=shard,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        if kind is Kind.MODEL or shard[0]:
            return
        task = bar.add_task("features")
        store_features(
            job.target,
            chunks,
            held_out,
            work=job.work,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


class Printer:
    """Prints the mean over the reports since the last line whenever ``every`` divides the step."""

    def __init__(self, every: int) -> None:
        self.every, self.pending = every, list[Report]()

    def __call__(self, report: Report) -> None:
        self.pending.append(report)
        if report.step % self.every:
            return
        count = len(self.pending)
        loss = sum(r.loss for r in self.pending) / count
        steps = zip(*(r.overlaps for r in self.pending), strict=True)
        overlaps = " ".join(f"{sum(step) / count:.4f}" for step in steps)
        console.print(
            f"step {report.step} ({report.progress:.1%}, {report.elapsed_s / 60:.1f} min): "
            f"loss {loss:.4f}, overlap {overlaps}, lr {report.lr:.2e}",
            highlight=False,
        )
        self.pending.clear()


def tell(
    job: Job,
    cursor: Cursor,
    *,
    epochs: float,
    target: Path,
    text: Path,
    command: str,
    licence: str,
) -> Story:
    """What the model card says of this run."""
    rows = [row for chunk in job.split.chunks for row in chunk]
    return Story(
        target=target.name,
        command=command,
        text=text.name,
        text_sha256=job.plan.text_sha256,
        target_sha256=job.plan.target_sha256,
        conversations=len(rows),
        tokens=sum(map(len, rows)),
        steps=cursor.step,
        epochs=epochs,
        train_minutes=cursor.elapsed_s / 60,
        threads=torch.get_num_threads(),
        licence=licence,
    )


def public_command(context: typer.Context) -> str:
    """The command that gives this draft again, without this machine's directories.

    Options which don't change the result, and those left at their default, are dropped. The
    thread count stays: it decides the order of sums and so the last bits.
    """
    unrelated = {"work", "phase", "shard", "minutes", "as_json"}
    words = ["python scripts/train_draft.py"]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name in unrelated or value == option.default:
            continue
        words.append(f"{option.opts[0]} {public_path(value) if isinstance(value, Path) else value}")
    return " ".join(words)


def public_path(path: Path) -> str:
    """``path`` as given if it's relative, its name alone if it names this machine's folders."""
    return path.name if path.is_absolute() else path.as_posix()


@app.command(epilog="Example: train_draft.py --target target/ --text answers.jsonl.xz --out draft/")
def main(
    context: typer.Context,
    target: Annotated[Path, typer.Option(help="Hugging Face directory or .gguf file.")],
    text: Annotated[
        Path, typer.Option(help="Conversations the target wrote: .jsonl or .jsonl.xz.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write; must be new or empty.")],
    kind: Annotated[
        Kind, typer.Option(help="Draft model, EAGLE-3 head, Medusa heads.")
    ] = Kind.MODEL,
    layers: Annotated[int, typer.Option(help="Layers to keep: half from each end.")] = 4,
    layer_ids: Annotated[str | None, typer.Option(help="Layers to keep, as 0,1,28,29.")] = None,
    draft_vocab: Annotated[int, typer.Option(help="Tokens the draft can propose.")] = 6144,
    start: Annotated[
        Path | None, typer.Option(help="An earlier draft to go on from, with a new schedule.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the text; fixes the schedule.")] = 2.0,
    batch_tokens: Annotated[int, typer.Option(help="Tokens an optimizer step.")] = 1024,
    minutes: Annotated[float | None, typer.Option(help="Hard stop; run again to go on.")] = None,
    conversations: Annotated[int | None, typer.Option(help="Train on this many only.")] = None,
    held_out: Annotated[int, typer.Option(help="Conversations kept for measuring.")] = 150,
    seed: Annotated[int, typer.Option(help="Order, held-out choice and prompt sampling.")] = 0,
    threads: Annotated[int, typer.Option(help="Processor threads.")] = 2,
    work: Annotated[Path, typer.Option(help="Resumable state.")] = Path("build/draft-work"),
    phase: Annotated[Phase, typer.Option(help="label and train may run side by side.")] = Phase.ALL,
    shard: Annotated[str, typer.Option(help="Of the labelling: INDEX/COUNT.")] = "0/1",
    licence: Annotated[str, typer.Option(help="For the model card.")] = "other",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Distil a small draft for TARGET from TEXT which it wrote."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    part = parse_shard(shard)
    try:
        check_out(out)
        job = prepare(
            target,
            text,
            work,
            draft_vocab=draft_vocab,
            held_out=held_out,
            chunk=64,
            conversations=conversations,
            seed=seed,
        )
        check_target(job.target, kind)
        chosen = chosen_layers(job.target, layers, layer_ids) if kind is Kind.MODEL else ()
        if phase is not Phase.TRAIN:
            run_labels(job, part, kind)
        if phase is Phase.LABEL:
            print(json.dumps({"labelled": str(work)}) if as_json else f"labelled into {work}")
            return
        run = Run(
            job=job,
            options=TrainOptions(epochs=epochs, batch_tokens=batch_tokens, seed=seed),
            out=out,
            minutes=minutes,
            report=Printer(every=50),
            tell=partial(
                tell,
                job,
                epochs=epochs,
                target=target,
                text=text,
                command=public_command(context),
                licence=licence,
            ),
        )
        figures = make(kind, run, chosen, start)
    except TrainDraftError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    print(result_line(out, figures, as_json=as_json))


def make(
    kind: Kind, run: Run, layer_ids: Sequence[int], start: Path | None
) -> Figures | ChainFigures:
    """Train, measure and write."""
    match kind:
        case Kind.MODEL:
            return make_model(run, layer_ids, start)
        case Kind.EAGLE3:
            return make_eagle(run, start)
        case Kind.MEDUSA:
            return make_medusa(run)


def result_line(out: Path, figures: Figures | ChainFigures, *, as_json: bool) -> str:
    """The last line of stdout."""
    if as_json:
        return json.dumps({"out": str(out)} | figures.rounded())
    overlap, agreement = (
        " ".join(f"{v:.3f}" for v in (value if isinstance(value, tuple) else (value,)))
        for value in (figures.overlap_sampled, figures.agreement)
    )
    return (
        f"{out}: overlap {overlap} at temperature 1, greedy agreement {agreement}, "
        f"{figures.length_greedy:.2f} tokens a greedy round of 4"
    )


if __name__ == "__main__":
    app()
