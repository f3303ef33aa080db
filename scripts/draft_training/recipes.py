"""From labels to a finished directory, for each kind of drafter."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from .chain_figures import ChainFigures, Draft, measure
from .chains import chain_draft, chain_loss, collate_chains
from .eagle import head_from
from .errors import StateError
from .evaluate import Figures, evaluate
from .export import Story, export
from .export_heads import export_eagle, export_medusa
from .features import load_held_out_features
from .job import Job
from .labels import file_sha256, load_held_out
from .medusa import MedusaHeads, collate_states, state_draft, state_loss
from .pairs import state_rows
from .start import linear_start
from .student import Student
from .training import (
    B,
    Cursor,
    L,
    Report,
    Row,
    Trainer,
    TrainOptions,
    batches,
    collate_labels,
    label_loss,
    read_labels,
)

# An EAGLE-3 head begins as one that drafts already: there's less to learn and more to refine.
EAGLE_LR, EAGLE_DECAY = 5e-4, 0.6


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every recipe is given."""

    job: Job
    options: TrainOptions
    out: Path
    minutes: float | None  # a hard stop
    report: Callable[[Report], None]
    tell: Callable[[Cursor], Story]

    def finish(
        self,
        trainer: Trainer[L, B],
        read: Callable[[Path, int], Iterator[Row]],
        collate: Callable[[Sequence[Row], float, TrainOptions, np.random.Generator], B],
    ) -> None:
        """Train to the planned end.

        Raises:
            StateError: ``minutes`` were up before; the state is kept for another run.
        """
        sizes = [len(chunk) for chunk in self.job.split.chunks]
        finished = trainer.run(
            batches(partial(read, self.job.work), collate, sizes, trainer.options),
            report=self.report,
            stop_after_s=math.inf if self.minutes is None else self.minutes * 60,
        )
        if not finished:
            raise StateError(
                f"--minutes: received {self.minutes}, up after step {trainer.cursor.step}. "
                "Expected time for the planned --epochs; run the same command with more minutes "
                "to go on."
            )


def make_model(run: Run, layer_ids: Sequence[int], start: Path | None) -> Figures:
    """A draft of some of the target's own layers."""
    job, vocabulary = run.job, torch.from_numpy(run.job.vocabulary)
    student = Student(job.target, layer_ids, vocabulary)
    options = replace(run.options, start_sha256=_start_sha256(start))
    if start is not None:
        student.begin_from(start, vocabulary)
    trainer = Trainer(student, label_loss, options, state=job.work / "train.pt")
    run.finish(trainer, read_labels, collate_labels)
    figures = evaluate(student, job.split.held_out, load_held_out(job.work), job.vocabulary)
    export(
        run.out,
        student,
        target_config=job.target.config,
        layer_ids=layer_ids,
        vocabulary=job.vocabulary,
        story=run.tell(trainer.cursor),
        figures=figures,
    )
    return figures


def _start_sha256(start: Path | None) -> str:
    """What a resumed run compares; an unreadable draft is refused when it's opened."""
    weights = None if start is None else start / "model.safetensors"
    return file_sha256(weights) if weights and weights.is_file() else ""


def make_eagle(run: Run, start: Path | None) -> ChainFigures:
    """An EAGLE-3 head, which begins as the linear one of the first window of chunks, or as the
    published one in ``start``."""
    job, state = run.job, run.job.work / "eagle3.pt"
    head = head_from(job.target, torch.from_numpy(job.vocabulary))
    options = replace(
        run.options, peak_lr=EAGLE_LR, decay_share=EAGLE_DECAY, start_sha256=_start_sha256(start)
    )
    if not state.exists():
        first = range(min(options.window, len(job.split.chunks)))
        rows = (row for chunk in first for row in state_rows(job.work, chunk))
        linear_start(head, job.target, rows)
        if start is not None:
            head.begin_from(start)
    trainer = Trainer(head, chain_loss, options, state=state)
    run.finish(trainer, state_rows, collate_chains)
    figures = _measure(job, partial(chain_draft, head))
    export_eagle(
        run.out,
        head,
        target_config=job.target.config,
        vocabulary=job.vocabulary,
        story=run.tell(trainer.cursor),
        figures=figures,
    )
    return figures


def make_medusa(run: Run) -> ChainFigures:
    """Medusa heads, which begin as the target's own choice."""
    job = run.job
    heads = MedusaHeads(job.target, torch.from_numpy(job.vocabulary))
    trainer = Trainer(heads, state_loss, run.options, state=job.work / "medusa.pt")
    run.finish(trainer, state_rows, collate_states)
    figures = _measure(job, partial(state_draft, heads))
    export_medusa(run.out, heads, story=run.tell(trainer.cursor), figures=figures)
    return figures


def _measure(job: Job, draft: Draft) -> ChainFigures:
    states, held_out = load_held_out_features(job.work), load_held_out(job.work)
    return measure(draft, job.split.held_out, states, held_out, job.vocabulary)
