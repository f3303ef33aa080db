#!/usr/bin/env python
"""Distil a small draft for a target from text which the target wrote.

    python scripts/train_draft.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --text smollm2_selfgen.jsonl.xz --out examples/smollm2-draft --epochs 2

The target first labels the text (``--work`` keeps the labels), then the draft is fitted to the
labels and measured on held-out conversations. Both phases go on where a killed run stopped.
Progress goes to stderr; the last line of stdout is the result.
"""

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from draft_training.errors import StateError, TrainDraftError
from draft_training.evaluate import Figures, evaluate
from draft_training.export import Story, check_out, export
from draft_training.labels import LabelPlan, file_sha256, label, load_held_out
from draft_training.student import Student, check_layers, choose_layers
from draft_training.target import load_target, special_ids
from draft_training.text import Split, check_ids, draft_vocabulary, read_conversations, split
from draft_training.training import Report, Trainer, TrainOptions, batches
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

console = Console(stderr=True)
app = typer.Typer(add_completion=False)


class Phase(StrEnum):
    """What to do; two ``label`` shards and a ``train`` may run side by side."""

    ALL = "all"
    LABEL = "label"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run's inputs, read and checked."""

    target: PreTrainedModel
    split: Split
    vocabulary: np.ndarray  # [D] i64
    plan: LabelPlan
    layer_ids: tuple[int, ...]
    work: Path


def prepare(
    target: Path,
    text: Path,
    work: Path,
    *,
    layers: int,
    layer_ids: str | None,
    draft_vocab: int,
    held_out: int,
    chunk: int,
    conversations: int | None,
    seed: int,
) -> Job:
    """Read and check every input before any work is done."""
    rows = read_conversations(text)
    model = load_target(target)
    vocab, total = model.config.vocab_size, model.config.num_hidden_layers
    check_ids(rows, vocab)
    chosen = (
        choose_layers(total, layers)
        if layer_ids is None
        else check_layers(total, _parse_ids(layer_ids))
    )
    parts = split(rows, seed=seed, held_out=held_out, chunk=chunk)
    vocabulary = draft_vocabulary(
        (row for rows_ in parts.chunks for row in rows_),
        vocab=vocab,
        size=draft_vocab,
        always=special_ids(model),
    )
    plan = LabelPlan(
        target_sha256=file_sha256(target),
        text_sha256=file_sha256(text),
        seed=seed,
        held_out=held_out,
        chunk=chunk,
        draft_vocab=draft_vocab,
    )
    plan.claim(work)
    return Job(
        target=model,
        split=parts.first(conversations),
        vocabulary=vocabulary,
        plan=plan,
        layer_ids=chosen,
        work=work,
    )


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


def run_labels(job: Job, shard: tuple[int, int]) -> None:
    """Label this shard behind a progress bar."""
    with Progress(console=console) as bar:
        task = bar.add_task("label")
        label(
            job.target,
            job.split.chunks,
            job.split.held_out,
            job.vocabulary,
            work=job.work,
            shard=shard,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def run_training(
    job: Job, options: TrainOptions, minutes: float | None, start: Path | None
) -> Trainer:
    """Fit the draft; a ``minutes`` stop keeps the state and asks for another run."""
    torch.manual_seed(options.seed)
    vocabulary = torch.from_numpy(job.vocabulary)
    student = Student(job.target, job.layer_ids, vocabulary)
    if start is not None:
        student.begin_from(start, vocabulary)
    trainer = Trainer(student, options, state=job.work / "train.pt")
    sizes = [len(chunk) for chunk in job.split.chunks]
    finished = trainer.run(
        batches(job.work, sizes, options),
        report=Printer(every=50),
        stop_after_s=math.inf if minutes is None else minutes * 60,
    )
    if not finished:
        raise StateError(
            f"--minutes: received {minutes}, up after step {trainer.cursor.step}. Expected time "
            "for the planned --epochs; run the same command with more minutes to go on."
        )
    return trainer


def start_sha256(start: Path | None) -> str:
    """What a resumed run compares; an unreadable draft is refused when it's opened."""
    weights = None if start is None else start / "model.safetensors"
    return file_sha256(weights) if weights and weights.is_file() else ""


class Printer:
    """Prints the mean over the reports since the last line whenever ``every`` divides the step."""

    def __init__(self, every: int) -> None:
        self.every, self.pending = every, list[Report]()

    def __call__(self, report: Report) -> None:
        self.pending.append(report)
        if report.step % self.every:
            return
        loss, overlap = (
            sum(getattr(r, name) for r in self.pending) / len(self.pending)
            for name in ("loss", "overlap")
        )
        console.print(
            f"step {report.step} ({report.progress:.1%}, {report.elapsed_s / 60:.1f} min): "
            f"loss {loss:.4f}, overlap {overlap:.4f}, lr {report.lr:.2e}",
            highlight=False,
        )
        self.pending.clear()


def tell(
    job: Job, trainer: Trainer, *, target: Path, text: Path, command: str, licence: str
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
        steps=trainer.cursor.step,
        epochs=trainer.options.epochs,
        train_minutes=trainer.cursor.elapsed_s / 60,
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
    part = parse_shard(shard)
    try:
        check_out(out)
        job = prepare(
            target,
            text,
            work,
            layers=layers,
            layer_ids=layer_ids,
            draft_vocab=draft_vocab,
            held_out=held_out,
            chunk=64,
            conversations=conversations,
            seed=seed,
        )
        if phase is not Phase.TRAIN:
            run_labels(job, part)
        if phase is Phase.LABEL:
            print(json.dumps({"labelled": str(work)}) if as_json else f"labelled into {work}")
            return
        options = TrainOptions(
            epochs=epochs, batch_tokens=batch_tokens, seed=seed, start_sha256=start_sha256(start)
        )
        trainer = run_training(job, options, minutes, start)
        figures = evaluate(trainer.student, job.split.held_out, load_held_out(work), job.vocabulary)
        export(
            out,
            trainer.student,
            target_config=job.target.config,
            layer_ids=job.layer_ids,
            vocabulary=job.vocabulary,
            story=tell(
                job,
                trainer,
                target=target,
                text=text,
                command=public_command(context),
                licence=licence,
            ),
            figures=figures,
        )
    except TrainDraftError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    print(result_line(out, figures, as_json=as_json))


def result_line(out: Path, figures: Figures, *, as_json: bool) -> str:
    """The last line of stdout."""
    if as_json:
        return json.dumps({"out": str(out)} | figures.rounded())
    return (
        f"{out}: overlap {figures.overlap_sampled:.3f} at temperature 1, greedy agreement "
        f"{figures.agreement:.3f}, {figures.length_greedy:.2f} tokens a greedy round of 4"
    )


if __name__ == "__main__":
    app()
