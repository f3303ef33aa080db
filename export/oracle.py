"""Record what the CPU graphs compute, for the machine with the GPU (`runtime.oracle`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from runtime.accept import AcceptStep
from runtime.buffers import RoundBuffers
from runtime.contract import accept_graph
from runtime.executor import EngineOptions, Executor
from runtime.oracle import ROWS, Oracle
from runtime.oracle_runs import accept_decisions, draft_ids

Array = np.ndarray


def record(
    bundle: Path,
    accept: Path,
    *,
    tokens: Sequence[int],
    logits: Array,  # [len(tokens), vocab] f32
    draft_probs: Array | None,  # [n, draft_vocab] f32, of the first n tokens
    d2t: Array | None,
    draft_vocab: int,
    max_draft_tokens: int,
) -> None:
    """Write `reports/oracle.npz` into the bundle (still unnamed)."""
    executor = Executor.load(accept, accept_graph(), EngineOptions(spin=False))
    buffers = RoundBuffers(max_draft_tokens, logits.shape[1], draft_vocab)
    ids = draft_ids(draft_vocab, d2t)
    accepted, drawn = accept_decisions(AcceptStep(executor, buffers), buffers, ids)
    none = np.zeros((0, 0), np.float32)
    Oracle(
        tokens=np.asarray(tokens, np.int64),
        logits=logits[-ROWS:],
        draft_probs=none if draft_probs is None else draft_probs[-ROWS:],
        num_accepted=accepted,
        next_token=drawn,
    ).save(bundle)
