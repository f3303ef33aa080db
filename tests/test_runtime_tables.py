"""What a request leaves in the sampling tables: what it committed, and nothing for the next one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from helpers_decode import (
    PROMPT,
    generate,
    params_of,
)
from helpers_runtime import (
    EOS,
    VOCAB,
)

from runtime import Decoder, Grammar, InvalidRequest, SamplingParams
from runtime.sampling_inputs import SamplingInputs
from runtime.sequence import FinishReason

GRAMMAR = Grammar.regex("(ab|a[0-9]){2,5}(-[xyz]{1,3})?")


def tables(decoder: Decoder) -> dict[str, np.ndarray]:
    return {n: v.copy() for n, v in decoder._open_rounds().buffers.sampling.shared.items()}


def check_tables(decoder: Decoder, params: SamplingParams, tokens: tuple[int, ...]) -> None:
    """As if the tokens had been committed one by one by a decoder that never drafted."""
    clean = SamplingInputs(VOCAB, 5)
    clean.begin(params, PROMPT)
    clean.commit(tokens)
    for name, value in tables(decoder).items():
        np.testing.assert_array_equal(value, clean.shared[name], name)
    assert clean.shared["output_counts"].sum() == len(tokens)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_round_cut_by_a_limit_counts_what_was_kept(twin: Decoder, max_tokens: int) -> None:
    params = params_of("together", max_tokens=max_tokens, min_tokens=0, ignore_eos=True)
    result = generate(twin, params, 4)
    assert len(result.token_ids) == max_tokens
    check_tables(twin, params, result.token_ids)


def test_a_round_cut_by_an_end_token_counts_what_was_kept(twin: Decoder) -> None:
    """The draft goes on behind the end; nothing of that is counted."""
    cut_within = 0
    for minimum in range(1, 12):
        params = params_of("repetition", min_tokens=minimum, logit_bias={EOS: 30.0})
        result = generate(twin, params, 4)
        assert result.finish_reason is FinishReason.EOS
        assert len(result.token_ids) == minimum + 1
        check_tables(twin, params, result.token_ids)
        cut_within += (minimum + 1 - 1) % 5 != 0
    assert cut_within > 5


def test_a_round_cut_by_a_stop_string_counts_what_was_kept(twin: Decoder) -> None:
    params = params_of("together", min_tokens=0, ignore_eos=True)
    whole = generate(twin, params, 4)
    letters = [twin.decode([t]) for t in whole.token_ids]
    readable = [i for i, c in enumerate(letters) if c.isascii() and c and letters.index(c) == i]
    assert len(readable) > 3
    for at in readable:
        stopped = replace(params, stop=(letters[at],))
        result = generate(twin, stopped, 4)
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids == whole.token_ids[: at + 1]
        check_tables(twin, stopped, result.token_ids)


def test_a_cancelled_round_counts_what_came_out(decoder: Decoder) -> None:
    params = params_of("together")
    with closing(decoder.stream(list(PROMPT), params, num_draft_tokens=4)) as stream:
        tokens = [t for _ in range(3) for t in next(stream).token_ids]
    check_tables(decoder, params, tuple(tokens))


@pytest.mark.parametrize("ended", ["finished", "cancelled", "refused"])
def test_nothing_is_left_for_a_request_that_asks_for_nothing(decoder: Decoder, ended: str) -> None:
    params = params_of("together", grammar=GRAMMAR, banned_tokens=(1,), max_tokens=15)
    with closing(decoder.stream(list(PROMPT), params, num_draft_tokens=4)) as stream:
        next(stream)
        if ended == "finished":
            list(stream)
    if ended == "refused":
        refused = replace(params, banned_tokens=tuple(range(VOCAB)), grammar=None)
        with pytest.raises(InvalidRequest):
            generate(decoder, refused, 4)
    assert generate(decoder, SamplingParams(max_tokens=3), 4).token_ids
    sampling, neutral = decoder._open_rounds().buffers.sampling, SamplingInputs(VOCAB, 5)
    for name, value in sampling.shared.items():
        np.testing.assert_array_equal(value, neutral.shared[name], name)
    assert sampling.allowed.all()
