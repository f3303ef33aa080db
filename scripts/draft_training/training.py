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

import numpy as np
import torch

from .errors import StateError
from .labels import wait_for_chunk, write_atomic
from .student import Student, distillation_loss
from .text import length_batches, pad


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
    overlap: float
    lr: float
    elapsed_s: float


def batches(work: Path, sizes: Sequence[int], options: TrainOptions) -> Iterator[Batch]:
    """All batches of the run, in their one order.

    Args:
        sizes: conversations in each chunk.
    """
    total, seen = options.epochs * sum(sizes), 0
    for epoch in range(math.ceil(options.epochs)):
        order = np.arange(len(sizes))
        if epoch:
            np.random.default_rng((options.seed, epoch)).shuffle(order)
        for start in range(0, len(order), options.window):
            chunks = [wait_for_chunk(work, int(i)) for i in order[start : start + options.window]]
            rng = np.random.default_rng((options.seed, epoch, start))
            rows = [row for chunk in chunks for row in _rows(chunk)]
            groups = list(length_batches([len(r["ids"]) for r in rows], options.batch_tokens))
            rng.shuffle(groups)
            for group in groups:
                if seen >= total:
                    return
                yield _collate([rows[i] for i in group], seen / total, options, rng)
                seen += len(group)


def _rows(chunk: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    ends = np.cumsum(chunk["lengths"])
    for end, length, prompt in zip(ends, chunk["lengths"], chunk["prompts"], strict=True):
        span = slice(end - length, end)
        yield {"prompt": prompt} | {k: chunk[k][span] for k in ("ids", "top_ids", "top_p")}


def _collate(
    rows: Sequence[dict[str, np.ndarray]],
    progress: float,
    options: TrainOptions,
    rng: np.random.Generator,
) -> Batch:
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


def _scored(
    row: dict[str, np.ndarray], prompt_share: float, rng: np.random.Generator
) -> np.ndarray:
    """Positions that predict an answer token, and a random share of the prompt's."""
    first = int(row["prompt"]) - 1
    in_prompt = np.flatnonzero(rng.random(first) < prompt_share)
    return np.concatenate([in_prompt, np.arange(first, len(row["ids"]) - 1)])


class Trainer:
    """Steps, checkpoints and resumes one student."""

    def __init__(self, student: Student, options: TrainOptions, *, state: Path) -> None:
        self.student, self.options, self.state = student, options, state
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
        source: Iterator[Batch],
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

    def _step(self, batch: Batch, began: float) -> Report:
        options, step = self.options, self.cursor.step
        lr = options.lr(batch.progress, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        logits = self.student(batch.tokens, batch.positions)
        loss, overlap = distillation_loss(
            logits, batch.top_ids, batch.top_p, options.overlap(batch.progress)
        )
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
            overlap=overlap.item(),
            lr=lr,
            elapsed_s=elapsed,
        )
