"""The door of the decoder: what is refused, how it says so, and that nothing is lost by it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from helpers_runtime import EOS, VOCAB, near_table, target_table, write_bundle

from runtime import Decoder, InvalidRequest, LimitExceeded, SamplingParams
from runtime.executor import EngineOptions
from runtime.sequence import FinishReason

TABLE = target_table(VOCAB)
TABLE[:, EOS] = -50.0
PARAMS = SamplingParams(max_tokens=5)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    path = tmp_path_factory.mktemp("requests") / "bundle"
    with Decoder.load(write_bundle(path, TABLE, near_table(TABLE, 0.5)), threads=1) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def draftless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    path = tmp_path_factory.mktemp("draftless") / "bundle"
    with Decoder.load(write_bundle(path, TABLE, None), threads=1) as decoder:
        yield decoder


@pytest.mark.parametrize("prompt", ["", [], [EOS + 2], [-1], [1.5], [True], 5, b"bytes", [1, "a"]])
def test_prompts_that_are_none_are_refused_at_once(decoder: Decoder, prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        decoder.stream(prompt)  # type: ignore[arg-type]


def test_messages_are_checked(decoder: Decoder) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
        decoder.generate([{"role": "user", "content": "x"}, {}])


def test_a_prompt_as_long_as_the_context(decoder: Decoder) -> None:
    with pytest.raises(LimitExceeded, match=r"received 97.*at most 96.*--max-context 97"):
        decoder.generate([1] * 96)


def test_more_drafts_than_were_built_for(decoder: Decoder) -> None:
    with pytest.raises(LimitExceeded, match=r"num_draft_tokens: received 5.*at most 4.*-k 5"):
        decoder.stream([1], num_draft_tokens=5)
    for k in (-1, True, "2"):
        with pytest.raises(InvalidRequest, match="num_draft_tokens"):
            decoder.stream([1], num_draft_tokens=k)  # type: ignore[arg-type]


def test_a_bundle_without_a_draft_decodes_plainly(draftless: Decoder) -> None:
    chosen = draftless.generate([1, 2], PARAMS)
    assert chosen.token_ids == draftless.generate([1, 2], PARAMS, num_draft_tokens=0).token_ids
    assert chosen.stats.acceptance_rate is None
    assert chosen.stats.as_dict()["draft_kv_occupancy"] == 0
    with pytest.raises(InvalidRequest, match="no draft"):
        draftless.generate([1, 2], PARAMS, num_draft_tokens=1)


def test_a_second_stream_is_refused_until_the_first_ends(decoder: Decoder) -> None:
    first = decoder.stream([1, 2], PARAMS)
    waiting = decoder.stream([3], PARAMS)  # holds nothing before it is consumed
    tokens = list(next(first).token_ids)
    with pytest.raises(InvalidRequest, match="busy"):
        next(waiting)
    with pytest.raises(InvalidRequest, match="busy"):
        decoder.generate([3], PARAMS)
    tokens += [token for chunk in first for token in chunk.token_ids]
    assert tuple(tokens) == decoder.generate([1, 2], PARAMS).token_ids


def test_another_thread_is_refused_as_well(decoder: Decoder) -> None:
    raised: list[Exception] = []

    def run() -> None:
        try:
            decoder.generate([1], PARAMS)
        except InvalidRequest as error:
            raised.append(error)

    stream = decoder.stream([1, 2], PARAMS)
    next(stream)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    stream.close()  # type: ignore[attr-defined]
    assert len(raised) == 1


def test_a_closed_stream_is_cancelled(decoder: Decoder) -> None:
    stream = decoder.stream([1, 2], SamplingParams(max_tokens=50), num_draft_tokens=4)
    committed = 2 + sum(len(next(stream).token_ids) for _ in range(3))
    stream.close()  # type: ignore[attr-defined]
    stats = decoder.stats
    assert stats is not None
    assert stats.finish_reason is FinishReason.CANCELLED
    assert stats.target_rows == committed - 1
    assert stats.num_output_tokens == committed - 2


def test_an_error_in_the_consumer_leaves_the_decoder_usable(decoder: Decoder) -> None:
    expected = decoder.generate([1, 2], PARAMS).token_ids

    def consume() -> None:
        for _ in decoder.stream([1, 2], PARAMS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert decoder.generate([1, 2], PARAMS).token_ids == expected


def test_an_error_inside_a_round_leaves_the_decoder_usable(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decoder.generate([1, 2], PARAMS, num_draft_tokens=3).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(decoder._open_rounds().accept, "decide", lambda k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decoder.generate([1, 2], PARAMS, num_draft_tokens=3)
    assert decoder.generate([1, 2], PARAMS, num_draft_tokens=3).token_ids == expected


def test_a_seed_is_drawn_and_told(decoder: Decoder) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    first, second = (decoder.generate([1], params) for _ in range(2))
    assert first.seed != second.seed
    assert first.stats.seed == first.seed
    again = SamplingParams(temperature=1.0, max_tokens=20, seed=first.seed)
    assert decoder.generate([1], again).token_ids == first.token_ids


def test_statistics_add_up(decoder: Decoder) -> None:
    result = decoder.generate([1, 2], SamplingParams(max_tokens=40), num_draft_tokens=3)
    stats = result.stats.as_dict()
    parts = ("draft_s", "verify_s", "accept_s", "overhead_s")
    assert sum(stats[part] for part in parts) == pytest.approx(stats["decode_s"])
    assert all(stats[part] > 0 for part in parts)
    assert stats["num_output_tokens"] == 40 == stats["num_decode_tokens"] + 1
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"]
    weighted = sum(n * rounds for n, rounds in enumerate(stats["acceptance_histogram"]))
    assert weighted == stats["num_accepted_draft_tokens"] == sum(stats["accepted_per_position"])
    assert sum(stats["drafted_per_position"]) == stats["num_draft_tokens"]
    assert stats["mean_acceptance_length"] == 1 + weighted / stats["num_spec_steps"]
    assert stats["target_kv_occupancy"] == 41 / 96
    assert sum(result.stats.itl) == pytest.approx(stats["decode_s"])


def test_a_closed_decoder_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_bundle(tmp_path_factory.mktemp("closed") / "bundle", TABLE, None)
    with Decoder.load(path, threads=1) as decoder:
        pass
    with pytest.raises(InvalidRequest, match="closed"):
        decoder.generate([1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop", 5),
    ],
)
def test_sampling_values_out_of_range_name_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}: received"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_extreme_values_within_range_decode(decoder: Decoder) -> None:
    params = SamplingParams(
        temperature=1e30, top_k=2**70, top_p=1e-30, seed=2**64 - 1, max_tokens=5, stop="zzz"
    )
    assert params.stop == ("zzz",)
    assert len(decoder.generate(np.array([1, 2]).tolist(), params).token_ids) == 5
    assert decoder.encode([np.int64(7)]) == [7]  # type: ignore[list-item]


def test_threads_are_at_least_one() -> None:
    with pytest.raises(InvalidRequest, match="threads: received 0"):
        EngineOptions(threads=0)
