"""The target's own conversations: reading, holding out, chunking and the draft vocabulary.

Invariant: everything here is a function of the file and the seed alone, so that two labelling
processes, a resumed run and a second machine all see the same chunks in the same order.
"""

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import TextError


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One prompt and the answer which the target wrote to it."""

    ids: np.ndarray  # [tokens] i32, prompt and answer
    prompt_tokens: int
    temperature: float

    @property
    def first_scored(self) -> int:
        """The first position whose prediction is an answer token."""
        return self.prompt_tokens - 1

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Conversations in their seeded order, the held-out ones apart."""

    held_out: tuple[Conversation, ...]
    chunks: tuple[tuple[Conversation, ...], ...]

    def first(self, conversations: int | None) -> "Split":
        """Keep the chunks that hold the first so many conversations, or all."""
        if conversations is None:
            return self
        kept, count = 0, 0
        while kept < len(self.chunks) and count < conversations:
            count += len(self.chunks[kept])
            kept += 1
        return Split(held_out=self.held_out, chunks=self.chunks[:kept])


def read_conversations(path: Path) -> list[Conversation]:
    """Read ``{"ids": [...], "p": prompt length, "t": temperature}``, one a line.

    Raises:
        TextError: the file is missing, a row is malformed, or no row has an answer.
    """
    if not path.is_file():
        raise TextError(
            f"--text: {path} is not a file. Expected JSON lines (or .xz of them) with the keys "
            "ids, p and t; give the path of text which the target wrote."
        )
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        rows = [_conversation(line, f"{path.name}:{n}") for n, line in enumerate(lines, 1)]
    answered = [row for row in rows if len(row) > row.prompt_tokens]
    if not answered:
        raise TextError(
            f"{path.name}: {len(rows)} conversations, none with an answer (len(ids) > p). "
            "Expected text which the target wrote after each prompt; generate answers first."
        )
    return answered


def _conversation(line: str, where: str) -> Conversation:
    try:
        row = json.loads(line)
        ids = np.asarray(row["ids"], dtype=np.int32)
        prompt, temperature = int(row["p"]), float(row["t"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise TextError(
            f"{where}: received {line.strip()[:60]!r} ({error!r}). Expected a JSON object with "
            "ids (a list of token ids), p (prompt length) and t (temperature); mend that line."
        ) from error
    if ids.ndim != 1 or not 1 <= prompt <= len(ids):
        raise TextError(
            f"{where}: received p={prompt} with ids of shape {list(ids.shape)}. Expected "
            "1 <= p <= len(ids); mend that line."
        )
    return Conversation(ids=ids, prompt_tokens=prompt, temperature=temperature)


def check_ids(conversations: Iterable[Conversation], vocab: int) -> None:
    """Reject ids the target doesn't have, before hours are spent on them."""
    for row in conversations:
        low, high = int(row.ids.min()), int(row.ids.max())
        if low < 0 or high >= vocab:
            raise TextError(
                f"The text has token id {low if low < 0 else high}. Expected 0 <= id < {vocab}, "
                "the target's vocabulary; use text encoded with this target's tokenizer."
            )


def split(conversations: Sequence[Conversation], *, seed: int, held_out: int, chunk: int) -> Split:
    """Shuffle, hold the first ``held_out`` out, and cut the rest into chunks."""
    if not 0 < held_out < len(conversations):
        raise TextError(
            f"--held-out: received {held_out} of {len(conversations)} conversations. Expected at "
            "least one to measure and one to train on; lower --held-out or add text."
        )
    order = np.random.default_rng(seed).permutation(len(conversations))
    rows = [conversations[i] for i in order]
    rest = rows[held_out:]
    chunks = tuple(tuple(rest[i : i + chunk]) for i in range(0, len(rest), chunk))
    return Split(held_out=tuple(rows[:held_out]), chunks=chunks)


def draft_vocabulary(
    conversations: Iterable[Conversation], *, vocab: int, size: int, always: Iterable[int]
) -> np.ndarray:
    """The ``size`` tokens the target writes most often, sorted by id.

    Args:
        always: ids which get in first: the special tokens that end an answer.

    Returns:
        Target ids. # [size] i64
    """
    if not 0 < size <= vocab:
        raise TextError(
            f"--draft-vocab: received {size}. Expected 1 to {vocab}, the target's vocabulary."
        )
    answers, prompts = np.zeros(vocab, np.int64), np.zeros(vocab, np.int64)
    for row in conversations:
        np.add.at(answers, row.ids[row.prompt_tokens :], 1)
        np.add.at(prompts, row.ids[: row.prompt_tokens], 1)
    answers[[i for i in always if 0 <= i < vocab]] = np.iinfo(np.int64).max
    # The last key sorts first; prompts and then the id itself break ties.
    order = np.lexsort((np.arange(vocab), -prompts, -answers))
    return np.sort(order[:size])


def length_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Group indices of similar length so that rows x longest <= ``budget`` tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def pad(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Right-pad to the longest row. # [batch, longest] i64

    Under a causal mask nothing before the padding sees it, so no attention mask is needed.
    """
    out = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return out
