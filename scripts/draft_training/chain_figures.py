"""How often the target would accept a head's chains of drafts, on text never trained on.

A head drafts a chain behind a true feature, so what it does at step j depends on where the chain
began. Every chain of every held-out answer is drafted along the text: up to the first draft that
isn't accepted a decoder has read the same tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from .evaluate import DRAFT_TOKENS, chain_length
from .labels import HeldOut
from .text import Conversation

# Predicts from one conversation's ids and states, for chains that begin at the pairs from `first`
# on: q of each step, as far as the conversation goes. # DRAFT_TOKENS x [chains - step, D] f32
Draft = Callable[[np.ndarray, np.ndarray, int], list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class ChainFigures:
    """Held-out figures; one value a step where there are several, NaN where there's no text."""

    answer_tokens: int
    overlap_sampled: tuple[float, ...]  # mean of sum(min(p, q)), on t > 0 text
    overlap_greedy_text: tuple[float, ...]  # the same on t = 0 text
    agreement: tuple[float, ...]  # argmax q = argmax p, on t = 0 text
    length_sampled: float  # tokens a round of DRAFT_TOKENS drafts, from the overlaps, t > 0
    length_greedy: float  # the same for greedy decoding, from the agreements, t = 0
    vocabulary_mass: float  # mean of sum(p) over the draft vocabulary: the overlap's ceiling

    def rounded(self) -> dict[str, object]:
        return {
            name: [round(v, 4) for v in value] if isinstance(value, tuple) else round(value, 4)
            for name, value in asdict(self).items()
        }


@torch.inference_mode()
def measure(
    draft: Draft,
    rows: Sequence[Conversation],
    states: np.ndarray,  # [tokens of rows, TAPS + 1, H] f16
    held_out: HeldOut,
    vocabulary: np.ndarray,  # [D] i64
) -> ChainFigures:
    """Compare every chain's q with the stored p on the answers of ``rows``."""
    overlap, agree, answer, token = [], [], 0, 0
    for row in rows:
        count = len(row) - row.prompt_tokens
        p = held_out.p[answer : answer + count].astype(np.float32)
        best = held_out.best[answer : answer + count]
        # The chain that drafts the first answer token begins one pair before it can be scored.
        first = row.first_scored - 1
        q = draft(row.ids, states[token : token + len(row)], max(first, 0))
        overlap.append(_by_step(q, count, lambda q, k, p=p: np.minimum(p[k], q).sum(1)))
        agree.append(_by_step(q, count, lambda q, k, b=best: vocabulary[q.argmax(1)] == b[k]))
        answer, token = answer + count, token + len(row)
    sampled = [i for i, row in enumerate(rows) if row.temperature > 0]
    greedy = [i for i, row in enumerate(rows) if row.temperature == 0]
    return ChainFigures(
        answer_tokens=answer,
        overlap_sampled=_means([overlap[i] for i in sampled]),
        overlap_greedy_text=_means([overlap[i] for i in greedy]),
        agreement=_means([agree[i] for i in greedy]),
        length_sampled=chain_length([overlap[i] for i in sampled]),
        length_greedy=chain_length([agree[i] for i in greedy]),
        vocabulary_mass=float(held_out.p.astype(np.float32).sum(1).mean()),
    )


def _by_step(
    steps: Sequence[torch.Tensor],
    count: int,
    accept: Callable[[np.ndarray, slice], np.ndarray],
) -> np.ndarray:
    """``accept`` of draft j of the round that begins at answer token t. # [count, steps] f64

    0 where the round is behind the text, and NaN-free: a prompt of one token has no pair before
    the answer, so its first round has no drafts.
    """
    out = np.zeros((count, len(steps)))
    for step, q in enumerate(steps):
        chains = min(len(q), count - step)
        begin = count - step - chains  # 0, or 1 behind a prompt of one token
        answers = slice(begin + step, count)
        out[begin : begin + chains, step] = accept(q[len(q) - chains :].numpy(), answers)
    return out


def _means(parts: Sequence[np.ndarray]) -> tuple[float, ...]:
    """By step, over the rounds which have that step within the text."""
    steps = range(DRAFT_TOKENS)
    columns = [np.concatenate([p[: len(p) - j, j] for p in parts] or [np.empty(0)]) for j in steps]
    return tuple(float(c.mean()) if len(c) else float("nan") for c in columns)
