"""What a build's CPU graphs computed, kept in the bundle for the machine that has the GPU.

Inputs are made from seeds by both sides, so that only results are kept: the target's logits and the
draft's q on a text, and what accept decided for a few rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .errors import BundleError

Array = NDArray[Any]
PATH = "reports/oracle.npz"
CASES = 24
ROWS = 8  # of logits and of q that are kept: the text's last


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """In f32 arithmetic, on the weights as they were rounded."""

    tokens: Array  # [n] i64
    logits: Array  # [ROWS, vocab] f32: behind the last tokens
    draft_probs: Array  # [ROWS, draft_vocab] f32, at temperature 1; [0, 0] without a draft engine
    num_accepted: Array  # [CASES] i64
    next_token: Array  # [CASES] i64

    def save(self, bundle: Path) -> None:
        path = bundle / PATH
        path.parent.mkdir(exist_ok=True)
        np.savez_compressed(path, **{one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def load(cls, bundle: Path) -> Self:
        """Raises BundleError."""
        try:
            with np.load(bundle / PATH, allow_pickle=False) as found:
                return cls(**{one.name: found[one.name] for one in fields(cls)})
        except (OSError, KeyError, ValueError) as error:
            raise BundleError(
                f"{PATH}: {error}. Expected what the build's CPU graphs computed; rebuild the "
                "bundle."
            ) from error


@dataclass(frozen=True, kw_only=True)
class AcceptCase:
    """One round for accept: a chain of k drafts."""

    k: int
    logits: Array  # [1, k + 1, vocab] f32
    draft_tokens: Array  # [1, k] i64
    draft_probs: Array  # [1, k, draft_vocab] f32
    accept_uniforms: Array  # [1, k] f32
    draw_uniforms: Array  # [1, k + 1] f32
    temperature: float
    top_k: int
    top_p: float


def accept_case(index: int, most: int, vocab: int, ids: Array) -> AcceptCase:
    """ids: the target's id of each draft token, ascending. Drafts are likely, to be accepted."""
    rng = np.random.Generator(np.random.Philox(key=np.array([index, vocab], np.uint64)))
    k = 1 + index % most
    logits = rng.standard_normal((1, k + 1, vocab)).astype(np.float32) * 4
    drafted = np.argmax(logits[0, :k][:, ids], axis=1)
    q = rng.random((1, k, len(ids)), np.float32) ** 8
    q[0, np.arange(k), drafted] += q.sum(-1)[0]  # half of the mass
    q /= q.sum(-1, keepdims=True)
    return AcceptCase(
        k=k,
        logits=logits,
        draft_tokens=ids[drafted][None].astype(np.int64),
        draft_probs=q,
        accept_uniforms=rng.random((1, k), np.float32),
        draw_uniforms=rng.random((1, k + 1), np.float32),
        temperature=(0.0, 0.7, 1.0)[index % 3],
        top_k=(0, 50)[index % 2],
        top_p=(1.0, 0.9)[index // 2 % 2],
    )
