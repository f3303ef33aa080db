"""What the target predicts at every position, stored once so that training needs no target.

A chunk holds, for each position of its conversations, the ``TOP`` likeliest ids of the draft
vocabulary and p renormalised over that vocabulary. Restricting is exact for the purpose: the
acceptance sum(min(p, q)) only counts tokens which the draft can propose, and a q above p there
accepts as well. The held-out conversations keep the whole row and the true normaliser instead,
so that the reported acceptance is honest.

Invariant: a chunk file is complete or absent (written aside, then renamed), and its content
depends on nothing but target, text, seed and vocabulary; ``plan.json`` guards that.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from .errors import StateError
from .text import Conversation, length_batches, pad

TOP = 32
BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class LabelPlan:
    """Everything the labels depend on."""

    target_sha256: str
    text_sha256: str
    seed: int
    held_out: int
    chunk: int
    draft_vocab: int

    def claim(self, work: Path) -> None:
        """Bind ``work`` to this plan, or refuse a directory that holds another one's labels."""
        work.mkdir(parents=True, exist_ok=True)
        path, mine = work / "plan.json", asdict(self)
        if not path.exists():
            write_atomic(path, lambda p: p.write_text(json.dumps(mine, indent=1) + "\n"))
        theirs = json.loads(path.read_text())
        if theirs != mine:
            changed = {k: (theirs.get(k), v) for k, v in mine.items() if theirs.get(k) != v}
            raise StateError(
                f"--work: {work} holds labels of another run; (there, now): {changed}. Expected "
                "the same target, text and options; give an empty --work or delete that one."
            )


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The target on the held-out answers, over the draft vocabulary."""

    p: np.ndarray  # [answer positions, D] f16, normalised over the full vocabulary
    best: np.ndarray  # [answer positions] i64, argmax over the full vocabulary
    temperature: np.ndarray  # [answer positions] f32, of the text


def file_sha256(path: Path) -> str:
    """Digest of a file, or of a directory's config and weights."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    files += [path / "config.json"] if path.is_dir() else []
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a neighbour of ``path``, then rename it into place."""
    part = path.with_name(f".{os.getpid()}.{path.name}")
    write(part)
    part.replace(path)


def chunk_path(work: Path, index: int) -> Path:
    return work / f"chunk-{index:05d}.npz"


@torch.inference_mode()
def label_chunk(
    target: PreTrainedModel, rows: Sequence[Conversation], head: torch.Tensor
) -> dict[str, np.ndarray]:
    """Run the target over ``rows``.

    Args:
        head: the target's head rows of the draft vocabulary. # [D, H] f32

    Returns:
        ``ids`` # [tokens] i32, ``lengths`` and ``prompts`` # [rows] i32,
        ``top_ids`` # [tokens, TOP] i32 draft ids, ``top_p`` # [tokens, TOP] f16.
    """
    top = min(TOP, len(head))
    top_ids: list[np.ndarray] = [np.empty(0)] * len(rows)
    top_p: list[np.ndarray] = [np.empty(0)] * len(rows)
    for batch, hidden in _hidden(target, rows):
        for index, states in zip(batch, hidden, strict=True):
            p, ids = F.softmax(states @ head.T, -1).topk(top, -1)
            top_p[index] = p.numpy().astype(np.float16)
            top_ids[index] = ids.numpy().astype(np.int32)
    return {
        "ids": np.concatenate([row.ids for row in rows]),
        "lengths": np.array([len(row) for row in rows], np.int32),
        "prompts": np.array([row.prompt_tokens for row in rows], np.int32),
        "top_ids": np.concatenate(top_ids),
        "top_p": np.concatenate(top_p),
    }


def _hidden(
    target: PreTrainedModel, rows: Sequence[Conversation]
) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Yield batches of row indices with their normed states, each # [tokens, H] f32."""
    lengths = [len(row) for row in rows]
    for batch in length_batches(lengths, BATCH_TOKENS):
        tokens = torch.from_numpy(pad([rows[i].ids for i in batch]))
        states = target.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        yield batch, [states[j, : lengths[i]] for j, i in enumerate(batch)]


@torch.inference_mode()
def label_held_out(
    target: PreTrainedModel, rows: Sequence[Conversation], vocabulary: np.ndarray
) -> HeldOut:
    """Run the target over the held-out rows with its full head."""
    weight = target.get_output_embeddings().weight
    p: list[np.ndarray] = [np.empty(0)] * len(rows)
    best: list[np.ndarray] = [np.empty(0)] * len(rows)
    for batch, hidden in _hidden(target, rows):
        for index, states in zip(batch, hidden, strict=True):
            logits = states[rows[index].first_scored : -1] @ weight.T
            best[index] = logits.argmax(-1).numpy()
            p[index] = F.softmax(logits, -1)[:, vocabulary].numpy().astype(np.float16)
    heat = [np.full(len(b), r.temperature, np.float32) for b, r in zip(best, rows, strict=True)]
    return HeldOut(p=np.concatenate(p), best=np.concatenate(best), temperature=np.concatenate(heat))


def label(
    target: PreTrainedModel,
    chunks: Sequence[Sequence[Conversation]],
    held_out: Sequence[Conversation],
    vocabulary: np.ndarray,
    *,
    work: Path,
    shard: tuple[int, int],
    progress: Callable[[int, int], None],
) -> None:
    """Label what is still missing of this shard's chunks; the held-out rows count as one.

    Args:
        shard: (index, count): this process takes chunks index, index + count, ...
        progress: called with chunks done and chunks in all.
    """
    index, count = shard
    head = target.get_output_embeddings().weight[torch.from_numpy(vocabulary)]
    mine = range(index, len(chunks), count)
    if index == 0 and not (work / "held-out.npz").exists():
        labels = vars(label_held_out(target, held_out, vocabulary))
        write_atomic(work / "held-out.npz", lambda p: _savez(p, labels))
    for done, i in enumerate(mine):
        progress(done, len(mine))
        if not chunk_path(work, i).exists():
            arrays = label_chunk(target, chunks[i], head)
            write_atomic(chunk_path(work, i), lambda p, a=arrays: _savez(p, a))
    progress(len(mine), len(mine))


def _savez(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as stream:  # np.savez would add a suffix to the name
        np.savez(stream, **arrays)


def load_held_out(work: Path) -> HeldOut:
    with np.load(work / "held-out.npz") as arrays:
        return HeldOut(**arrays)


def wait_for_chunk(work: Path, index: int) -> dict[str, np.ndarray]:
    """Load a chunk's labels, waiting for another process which still makes them."""
    with np.load(wait_for(chunk_path(work, index))) as arrays:
        return dict(arrays)


def wait_for(path: Path, *, poll_s: float = 5.0) -> Path:
    """``path``, once it's there: files appear whole, so it can be read at once."""
    while not path.exists():
        time.sleep(poll_s)
    return path
