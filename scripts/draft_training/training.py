"""Fitting the draft to the labels.

Invariant: the state after step n is a function of labels, options and n. The batches of a window
of chunks are drawn from a generator seeded by (seed, epoch, window), so a resumed run rebuilds
them instead of storing them, and labelling may still be under way: the first epoch visits the
chunks in the order in which they're labelled and waits for the next one when it's early.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn

from .errors import StateError
from .labels import wait_for_chunk, write_atomic
from .student import Student, distillation_loss
from .text import length_batches, pad

Row: TypeAlias = dict[str, np.ndarray]  # one conversation, by token; "prompt" is its length
L = TypeVar("L", bound="Learner")
B = TypeVar("B", bound="Sized")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the result of a run depends on, beside the labels and the student's start."""

    epochs: float
    batch_tokens: int = 1024
    window: int = 4  # chunks that are shuffled together
    peak_lr: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    prompt_share: float = 0.2  # of the prompt positions, drawn anew each time
    decay_share: float = 0.4  # of the run, at its end
    overlap_weight: float = 0.7  # of the loss, at the end of the run
    seed: int = 0
    start_sha256: str = ""  # of the draft that it begins from; "" begins from the target's layers

    def decayed(self, progress: float) -> float:
        """How far into the decay ``progress`` is, 0 to 1.

        Until the decay begins nothing depends on the run's length, so a run may still be made
        longer or shorter then and equals one that was planned so.
        """
        return min(max(0.0, (progress - 1 + self.decay_share) / self.decay_share), 1.0)

    def lr(self, progress: float, step: int) -> float:
        """Warm up, hold, then decay linearly to 0."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.peak_lr * warm * (1 - self.decayed(progress))

    def overlap(self, progress: float) -> float:
        """The overlap's weight: 0 until the decay begins, then rising."""
        return self.overlap_weight * self.decayed(progress)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One optimizer step's worth of conversations."""

    progress: float  # 0 to 1, share of the run's conversations seen before this batch
    tokens: torch.Tensor  # [batch, length] i64
    positions: torch.Tensor  # [scored] i64, into batch x length
    top_ids: torch.Tensor  # [scored, TOP] i64
    top_p: torch.Tensor  # [scored, TOP] f32


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where a run stands: everything a resumed run needs beside weights and moments."""

    step: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """One progress line."""

    step: int
    progress: float
    loss: float
    overlaps: tuple[float, ...]  # one, or one for each step of a chain
    lr: float
    elapsed_s: float


def batches(
    read: Callable[[int], Iterator[Row]],
    collate: Callable[[Sequence[Row], float, TrainOptions, np.random.Generator], B],
    sizes: Sequence[int],
    options: TrainOptions,
) -> Iterator[B]:
    """All batches of the run, in their one order.

    Args:
        read: the conversations of a chunk; waits for it while it's still being made.
        collate: a batch of conversations, the run's progress, and what it may draw from.
        sizes: conversations in each chunk.
    """
    total, seen = options.epochs * sum(sizes), 0
    for epoch in range(math.ceil(options.epochs)):
        order = np.arange(len(sizes))
        if epoch:
            np.random.default_rng((options.seed, epoch)).shuffle(order)
        for start in range(0, len(order), options.window):
            rng = np.random.default_rng((options.seed, epoch, start))
            rows = [row for i in order[start : start + options.window] for row in read(int(i))]
            groups = list(length_batches([len(r["ids"]) for r in rows], options.batch_tokens))
            rng.shuffle(groups)
            for group in groups:
                if seen >= total:
                    return
                yield collate([rows[i] for i in group], seen / total, options, rng)
                seen += len(group)


def read_labels(work: Path, index: int) -> Iterator[Row]:
    """A chunk's conversations with their labels."""
    return label_rows(wait_for_chunk(work, index))


def label_rows(chunk: dict[str, np.ndarray]) -> Iterator[Row]:
    """Cut a chunk's arrays into conversations: ids, prompt, top_ids and top_p."""
    ends = np.cumsum(chunk["lengths"])
    for end, length, prompt in zip(ends, chunk["lengths"], chunk["prompts"], strict=True):
        span = slice(end - length, end)
        yield {"prompt": prompt} | {k: chunk[k][span] for k in ("ids", "top_ids", "top_p")}


def collate_labels(
    rows: Sequence[Row],
    progress: float,
    options: TrainOptions,
    rng: np.random.Generator,
) -> Batch:
    """Pad ``rows`` into one batch."""
    tokens = pad([row["ids"] for row in rows])
    scored = [_scored(row, options.prompt_share, rng) for row in rows]
    positions = [i * tokens.shape[1] + s for i, s in enumerate(scored)]
    pick = lambda key: np.concatenate([r[key][s] for r, s in zip(rows, scored, strict=True)])  # noqa: E731
    return Batch(
        progress=progress,
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(np.concatenate(positions)),
        top_ids=torch.from_numpy(pick("top_ids").astype(np.int64)),
        top_p=torch.from_numpy(pick("top_p").astype(np.float32)),
    )


def _scored(row: Row, prompt_share: float, rng: np.random.Generator) -> np.ndarray:
    """Positions that predict an answer token, and a random share of the prompt's."""
    first = int(row["prompt"]) - 1
    in_prompt = np.flatnonzero(rng.random(first) < prompt_share)
    return np.concatenate([in_prompt, np.arange(first, len(row["ids"]) - 1)])


def label_loss(
    student: Student, batch: Batch, overlap_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distillation loss, and the overlap. # scalar, [1] f32"""
    logits = student(batch.tokens, batch.positions)
    loss, overlap = distillation_loss(logits, batch.top_ids, batch.top_p, overlap_weight)
    return loss, overlap[None]


class Learner(Protocol):
    """What can be trained: a module that knows which of its tensors are its own."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def train(self) -> object: ...

    def own_state(self) -> dict[str, torch.Tensor]: ...

    def load_own_state(self, state: dict[str, torch.Tensor]) -> None: ...


class Sized(Protocol):
    """Any kind of batch."""

    @property
    def progress(self) -> float: ...


class Trainer(Generic[L, B]):
    """Steps, checkpoints and resumes one student."""

    def __init__(
        self,
        student: L,
        loss: Callable[[L, B, float], tuple[torch.Tensor, torch.Tensor]],
        options: TrainOptions,
        *,
        state: Path,
    ) -> None:
        """Begin anew, or where the run that wrote ``state`` stopped.

        Args:
            loss: of a student on a batch, given the overlap's weight; with it come the overlaps
                to report.
        """
        self.student, self.loss, self.options, self.state = student, loss, options, state
        trained = [p for p in student.parameters() if p.requires_grad]
        self.trained = trained
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=options.peak_lr,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.cursor = Cursor()
        if state.exists():
            self._resume()

    def _resume(self) -> None:
        saved = torch.load(self.state, weights_only=True)
        if saved["options"] != asdict(self.options):
            raise StateError(
                f"--work: {self.state} belongs to a run with {saved['options']}. Expected "
                f"{asdict(self.options)}; repeat that run's options or delete the file."
            )
        self.student.load_own_state(saved["student"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.cursor = Cursor(**saved["cursor"])

    def save(self) -> None:
        """Write everything a resumed run needs, whole or not at all."""
        saved = {
            "options": asdict(self.options),
            "student": self.student.own_state(),
            "optimizer": self.optimizer.state_dict(),
            "cursor": asdict(self.cursor),
        }
        write_atomic(self.state, lambda path: torch.save(saved, path))

    def run(
        self,
        source: Iterator[B],
        *,
        report: Callable[[Report], None],
        save_every_s: float = 180.0,
        stop_after_s: float = math.inf,
    ) -> bool:
        """Train on what's left of ``source``; save at the end and every ``save_every_s``.

        Returns:
            Whether the run came to its planned end (False: ``stop_after_s`` cut it).
        """
        began, saved = time.monotonic() - self.cursor.elapsed_s, time.monotonic()
        self.student.train()
        finished = True
        for index, batch in enumerate(source):
            if index < self.cursor.step:
                continue
            if time.monotonic() - began > stop_after_s:
                finished = False
                break
            report(self._step(batch, began))
            if time.monotonic() - saved > save_every_s:
                self.save()
                saved = time.monotonic()
        self.save()
        return finished

    def _step(self, batch: B, began: float) -> Report:
        options, step = self.options, self.cursor.step
        lr = options.lr(batch.progress, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss, overlaps = self.loss(self.student, batch, options.overlap(batch.progress))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, options.clip)
        self.optimizer.step()
        elapsed = time.monotonic() - began
        self.cursor = Cursor(step=step + 1, elapsed_s=elapsed)
        return Report(
            step=step + 1,
            progress=batch.progress,
            loss=loss.item(),
            overlaps=tuple(overlaps.tolist()),
            lr=lr,
            elapsed_s=elapsed,
        )
