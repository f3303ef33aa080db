"""A target graph of which any layers can be left out: what a search asks, and nothing ships it.

It answers what acceptance a set of layers would have, by the drafting that a round does: behind
exact rows of the text so far, a block is read through the kept layers alone, as if each draft were
the text's own token. A row then sees just the approximate rows that a draft would have left.

Invariant: between calls the cache holds exact rows of the text that is being scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.contract import SKIP_LAYERS, CacheSpec, GraphSpec, TensorSpec, target_graph
from runtime.executor import Call, EngineOptions, Executor, cache_buffers
from runtime.tree_buffers import chain_inputs

Array = NDArray[Any]
PREFILL = 64  # rows a call


@dataclass(frozen=True, kw_only=True)
class Page:
    """A text that the target wrote greedily, and its exact cache rows."""

    tokens: Sequence[int]  # prompt and answer
    start: int  # tokens of the prompt
    rows: Mapping[str, Array]  # cache → [1, kv_heads, len(tokens) - 1, head_dim]


class SkippableGraph:
    """One session over one cache; `skipped` of a call is any set of layers."""

    def __init__(self, path: Path, cache: CacheSpec, vocab_size: int, most_rows: int) -> None:
        self._executor = Executor.load(path, _spec(cache), EngineOptions(spin=False))
        self._past = cache_buffers(cache.past(), cache.shape(1))
        pairs = zip(cache.past(), cache.present(), strict=True)
        self._present = {present.name: self._past[past.name] for past, present in pairs}
        self._length = np.zeros(1, np.int32)
        self._skips = np.zeros(cache.layers, np.bool_)
        self._ids = np.zeros((1, PREFILL), np.int64)
        self._logits = np.zeros((1, most_rows, vocab_size), np.float32)
        self._calls: dict[tuple[int, int], Call] = {}

    def write(self, prompt: Sequence[int], count: int, ends: Sequence[int]) -> Page:
        """Let the whole target write up to `count` tokens behind the prompt."""
        tokens = list(prompt)
        for start in range(0, len(prompt), PREFILL):
            likeliest = self._read(prompt[start : start + PREFILL], start, rows=1)
        tokens.append(int(likeliest[0]))
        while len(tokens) < len(prompt) + count and tokens[-1] not in ends:
            tokens.append(int(self._read(tokens[-1:], len(tokens) - 1, rows=1)[0]))
        kept = {name: a[:, :, : len(tokens) - 1].copy() for name, a in self._past.items()}
        return Page(tokens=tokens, start=len(prompt), rows=kept)

    def hits(self, page: Page, skipped: Sequence[int], block: int) -> list[bool]:
        """For each token of the answer behind the first: whether the kept layers predict it."""
        found: list[bool] = []
        self._restore(page, 0, len(page.tokens))
        for start in range(page.start, len(page.tokens) - 1, block):
            end = min(start + block, len(page.tokens) - 1)
            guesses = self._read(page.tokens[start:end], start, rows=end - start, skipped=skipped)
            found += [a == b for a, b in zip(guesses, page.tokens[start + 1 :], strict=False)]
            self._restore(page, start, end + 1)  # a lone row may have left a copy behind it
        return found

    def seconds(self, rows: int, skipped: Sequence[int], length: int) -> float:
        """Of one call of so many rows behind `length` others."""
        start = perf_counter()
        self._read([1] * rows, length, rows=rows, skipped=skipped)
        return perf_counter() - start

    def _restore(self, page: Page, start: int, end: int) -> None:
        end = min(end, len(page.tokens) - 1)
        for name, rows in page.rows.items():
            self._past[name][:, :, start:end] = rows[:, :, start:end]

    def _read(
        self, tokens: Sequence[int], length: int, *, rows: int, skipped: Sequence[int] = ()
    ) -> Array:
        """The likeliest token behind each of the last `rows` tokens: [rows] i64."""
        self._skips[:] = False
        self._skips[list(skipped)] = True
        self._length[0] = length
        self._ids[0, : len(tokens)] = tokens
        self._call(len(tokens), rows).run()
        likeliest: Array = self._logits[0, :rows].argmax(-1)
        return likeliest

    def _call(self, count: int, rows: int) -> Call:
        if (count, rows) not in self._calls:
            inputs: dict[str, Array] = {
                "input_ids": self._ids[:, :count],
                "past_lengths": self._length,
                "num_logits": np.array(rows, np.int64),
                **chain_inputs(count),
                SKIP_LAYERS.name: self._skips,
                **self._past,
            }
            outputs = {"logits": self._logits[:, :rows], **self._present}
            self._calls[count, rows] = self._executor.bind(inputs, outputs)
        return self._calls[count, rows]


def _spec(cache: CacheSpec) -> GraphSpec:
    each = TensorSpec(name=SKIP_LAYERS.name, dtype=SKIP_LAYERS.dtype, axes=(cache.layers,))
    return target_graph(cache, switches=(each,))
