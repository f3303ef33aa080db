"""How often the target would accept the draft, on text that was never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .labels import HeldOut
from .student import Student, predict
from .text import Conversation

DRAFT_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Held-out figures; NaN where the text holds no row of that temperature."""

    answer_tokens: int
    overlap_sampled: float  # mean of sum(min(p, q)) over the full vocabulary, on t > 0 text
    overlap_greedy_text: float  # the same on t = 0 text
    agreement: float  # argmax q = argmax p, on t = 0 text
    length_sampled: float  # tokens a round with DRAFT_TOKENS drafts, from the overlaps, t > 0
    length_greedy: float  # the same for greedy decoding, from the agreements, t = 0
    vocabulary_mass: float  # mean of sum(p) over the draft vocabulary: the overlap's ceiling

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in vars(self).items()}


def evaluate(
    student: Student,
    rows: Sequence[Conversation],
    held_out: HeldOut,
    vocabulary: np.ndarray,  # [D] i64
) -> Figures:
    """Compare q with the stored p on the answers of ``rows``."""
    student.eval()
    overlap, agree, begin = [], [], 0
    for row in rows:
        count = len(row) - row.prompt_tokens
        p = held_out.p[begin : begin + count].astype(np.float32)
        best = held_out.best[begin : begin + count]
        ids = torch.from_numpy(row.ids.astype(np.int64))
        q = predict(student, ids)[row.first_scored : -1].numpy()
        overlap.append(np.minimum(p, q).sum(1))
        agree.append((vocabulary[q.argmax(1)] == best).astype(np.float64))
        begin += count
    sampled = [i for i, row in enumerate(rows) if row.temperature > 0]
    greedy = [i for i, row in enumerate(rows) if row.temperature == 0]
    return Figures(
        answer_tokens=begin,
        overlap_sampled=_mean([overlap[i] for i in sampled]),
        overlap_greedy_text=_mean([overlap[i] for i in greedy]),
        agreement=_mean([agree[i] for i in greedy]),
        length_sampled=round_length([overlap[i] for i in sampled], DRAFT_TOKENS),
        length_greedy=round_length([agree[i] for i in greedy], DRAFT_TOKENS),
        vocabulary_mass=float(held_out.p.astype(np.float32).sum(1).mean()),
    )


def _mean(parts: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(parts).mean()) if parts else float("nan")


def round_length(accepts: Sequence[np.ndarray], k: int) -> float:
    """Expected tokens a round commits where a draft's acceptance depends on its token alone.

    Args:
        accepts: for each text, the chance that each token is accepted. # [tokens] f64 each
        k: tokens drafted a round.
    """
    padded = [np.concatenate([accept, np.zeros(k)]) for accept in accepts]
    return chain_length([np.lib.stride_tricks.sliding_window_view(a, k)[:-1] for a in padded])


def chain_length(accepts: Sequence[np.ndarray]) -> float:
    """Expected tokens a round commits when text with these acceptances is decoded.

    Walks each text as the decoder would: a round that starts at t commits the accepted tokens
    and one more (recovered or bonus), and the next starts behind them. Exact for greedy decoding,
    where up to the first disagreement the draft's own context is the text itself.

    Args:
        accepts: for each text, the chance that draft j of a round which starts at t is accepted,
            if those before it are; 0 behind the text. # [tokens, drafts] f64 each
    """
    tokens, rounds = 0, 0.0
    for accept in accepts:
        starts = np.zeros(sum(accept.shape) + 1)  # chance that a round starts here
        starts[0] = 1.0
        for t, chances in enumerate(accept):
            reached = starts[t] * np.cumprod([1.0, *chances])  # that so many are accepted
            rejected = np.append(1 - chances, 1.0)
            starts[t + 1 : t + 1 + len(reached)] += reached * rejected
        tokens += len(accept)
        rounds += starts[: len(accept)].sum()
    return float(tokens / rounds) if rounds else float("nan")
