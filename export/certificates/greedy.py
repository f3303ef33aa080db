"""Greedy with drafts against greedy without, over real text.

They may differ for one reason only: an engine that rounds activations gives slightly other logits
for a row among k + 1 than for a row alone, and where the two likeliest tokens are nearer than that
the choice may turn. How much rows differ is measured here on the plain text's own tokens, drafts
taking no part, and a difference at a wider margin is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.round import Rounds
from runtime.tree import Tree

from .report import Certificate, judged
from .target_rows import GREEDY, TargetRows
from .world import Array

NAME = "greedy"
CLAIM = "Greedy text is the same with drafts as without, but where two tokens nearly tie."
TOKENS = 6


@dataclass(kw_only=True)
class Tally:
    """What the texts showed so far."""

    prompts: int = 0
    tokens: int = 0
    accepted: int = 0
    noise: float = 0.0  # largest change of a top-2 margin between a row alone and among k + 1
    margins: list[float] = field(default_factory=list)  # where texts first differ

    def as_figures(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "accepted_draft_tokens": self.accepted,
            "equal_texts": self.prompts - len(self.margins),
            "differences": len(self.margins),
            "widest_margin_at_a_difference": max(self.margins, default=0.0),
            "noise": self.noise,
        }


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Plain greedy decoding: tokens behind the prompt, and the row that each was chosen from."""

    tokens: list[int]
    rows: list[Array]  # [vocab] f32 each


def certify(
    rows: TargetRows,
    prompts: Sequence[Sequence[int]],
    k: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Certificate:
    """Decode every prompt both ways; the prompts are read once."""
    tally = Tally()
    for prompt in prompts:
        _compare(rows, list(prompt), k, tally)
        progress(tally.prompts)
    faults = [
        f"a text differs at a top-2 margin of {margin:.3g}, beyond the noise of {tally.noise:.3g}"
        for margin in tally.margins
        if margin > tally.noise
    ]
    return judged(NAME, CLAIM, tally.as_figures() | {"num_draft_tokens": k}, faults[:3])


def _compare(rows: TargetRows, prompt: list[int], k: int, tally: Tally) -> None:
    plain = _plain(rows, prompt)
    tally.noise = max(tally.noise, _noise(rows, prompt, plain, k))
    drafted, accepted = _drafted(rows, prompt, plain.tokens[0], k)
    for row, expected, received in zip(plain.rows, plain.tokens, drafted, strict=True):
        if received != expected:
            tally.margins.append(_margin(row))
            break
    tally.prompts += 1
    tally.tokens += len(plain.tokens)
    tally.accepted += accepted


def _plain(rows: TargetRows, prompt: list[int]) -> Plain:
    rounds, logits = rows.rounds, rows.rounds.buffers.logits
    rounds.begin(GREEDY, prompt)
    tokens = [*prompt, *rounds.prefill(prompt, rows.uniforms).tokens]
    seen = [logits[0, 0].copy()]
    while len(tokens) < len(prompt) + TOKENS:
        tokens += rounds.run(tokens, 0, rows.uniforms).tokens
        seen.append(logits[0, 0].copy())
    return Plain(tokens=tokens[len(prompt) :], rows=seen)


def _noise(rows: TargetRows, prompt: list[int], plain: Plain, k: int) -> float:
    """Largest change of a top-2 margin when the plain text's own rows are run k + 1 at once."""
    rounds, worst = rows.rounds, 0.0
    tokens = [*prompt, *plain.tokens]
    for start in range(len(prompt), len(tokens) - 1, k + 1):
        block = tokens[start : start + k + 1]
        if len(block) < 2:
            break
        rounds.target.length = start  # plain decoding left the rows before
        rounds.buffers.query(len(block))[0] = block
        rounds.target.verify(len(block))
        pairs = zip(plain.rows[start - len(prompt) + 1 :], range(len(block)), strict=False)
        for row, i in pairs:
            worst = max(worst, _change(row, rounds.buffers.logits[0, i]))
    return worst


def tree_noise(rows: TargetRows, prompts: Sequence[Sequence[int]]) -> float:
    """The same of a tree: every token of the plain text stands behind a sibling that is wrong.

    Such a row looks at the same rows as in a chain, but they lie elsewhere in the cache, so that
    sums over them are rounded otherwise.
    """
    worst = 0.0
    for prompt in prompts:
        plain = _plain(rows, list(prompt))
        worst = max(worst, _among_siblings(rows.rounds, list(prompt), plain))
    return worst


def _among_siblings(rounds: Rounds, prompt: list[int], plain: Plain) -> float:
    path = plain.tokens[: 1 + rounds.buffers.max_nodes // 2]
    block, parents = [path[0]], list[int]()
    for i, token in enumerate(path[1:]):
        block += [path[0], token]
        parents += [2 * i, 2 * i]
    tree = Tree(tuple(parents))
    rounds.target.length = len(prompt)
    rounds.buffers.query(len(block))[0] = block
    rounds.buffers.tree(tree.size).set(tree)
    rounds.target.verify_tree(len(block))
    found = rounds.buffers.logits[0, 0 : len(block) : 2]
    return max(_change(row, other) for row, other in zip(plain.rows[1:], found, strict=False))


def _drafted(rows: TargetRows, prompt: list[int], first: int, k: int) -> tuple[list[int], int]:
    """The same text with drafts, behind the prompt and first token that plain decoding read."""
    rounds: Rounds = rows.rounds
    tokens, accepted = [*prompt, first], 0
    rounds.rollback(len(tokens))
    if rounds.drafter:
        rounds.drafter.rollback(0)
    while len(tokens) < len(prompt) + TOKENS:
        outcome = rounds.run(tokens, k, rows.uniforms)
        tokens += outcome.tokens
        accepted += outcome.num_accepted
    return tokens[len(prompt) : len(prompt) + TOKENS], accepted


def _margin(row: Array) -> float:
    second, first = np.partition(row, -2)[-2:]
    return float(first - second)


def _change(row: Array, other: Array) -> float:
    """How much the margin between the row's two likeliest tokens moved."""
    second, first = np.argpartition(row, -2)[-2:]
    return abs(float((row[first] - row[second]) - (other[first] - other[second])))
