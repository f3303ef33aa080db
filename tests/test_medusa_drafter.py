"""Medusa heads at run time: each draft is its own head's, read at the target's last state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers_medusa import write_medusa_bundle
from helpers_runtime import STATES, reference_greedy, target_table

from runtime import Decoder, SamplingParams
from runtime.outcome import Outcome

TOKENS, CONTEXT, HEADS = 8, 96, 3
TABLE = target_table(TOKENS, sharpness=1.0)
PROMPT = [1, 2, 3, 1, 2, 3, 4, 1, 2]


def _hash(tokens: list[int]) -> int:
    """What the target's last state says of the tokens up to it."""
    return int(np.dot(tokens, np.arange(len(tokens)) * 3 % 11 + 1)) % STATES


def test_each_draft_is_its_heads_likeliest_token(tmp_path: Path) -> None:
    tables = np.random.default_rng(4).standard_normal((STATES, HEADS, TOKENS)).astype(np.float32)
    path = write_medusa_bundle(tmp_path / "bundle", TABLE, tables, context=CONTEXT, eos=())
    with Decoder.load(path, threads=1) as decoder:
        rounds = decoder._open_rounds()
        tokens, seen = list(PROMPT), list[bool]()
        drafts: list[list[int]] = []

        def note(outcome: Outcome) -> None:
            drafts.append(rounds.buffers.drafts(outcome.num_drafted)[0].tolist())

        decoder.on_round = note
        for chunk in decoder.stream(PROMPT, SamplingParams(max_tokens=40), num_draft_tokens=4):
            if drafts:
                expected = tables[_hash(tokens[:-1])].argmax(-1).tolist()
                seen.append(drafts[-1] == expected[: len(drafts[-1])])
            tokens += chunk.token_ids
    assert len(seen) > 15
    assert all(seen)
    assert max(map(len, drafts)) == HEADS  # there are no more, whatever k
    assert tokens[len(PROMPT) :] == reference_greedy(TABLE, PROMPT, 40)


def test_heads_over_some_tokens(tmp_path: Path) -> None:
    kept = np.array([0, 2, 5, 6])
    shape = (STATES, HEADS, len(kept))
    tables = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    path = write_medusa_bundle(
        tmp_path / "bundle",
        TABLE,
        tables,
        context=CONTEXT,
        d2t=kept - np.arange(len(kept)),
        eos=(),
    )
    with Decoder.load(path, threads=1) as decoder:
        rounds = decoder._open_rounds()
        drafted: set[int] = set()
        decoder.on_round = lambda o: drafted.update(
            rounds.buffers.drafts(o.num_drafted)[0].tolist()
        )
        result = decoder.generate(PROMPT, SamplingParams(max_tokens=60), num_draft_tokens=3)
    assert drafted == set(kept.tolist())
    assert list(result.token_ids) == reference_greedy(TABLE, PROMPT, 60)
