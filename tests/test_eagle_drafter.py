"""EAGLE heads at run time: which state goes with which token, whatever happened in between.

The head of these tests is its target as long as it gets the right states, so that a single wrong
pairing shows as a rejected draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers_eagle import write_eagle_bundle
from helpers_runtime import (
    reference_greedy,
    reference_sampled,
    save_target,
    target_table,
)

from runtime import Decoder, EngineError, SamplingParams
from runtime.bundle import Bundle
from runtime.engine import load_rounds
from runtime.executor import EngineOptions
from runtime.features import FeatureStore
from runtime.uniforms import uniform_table

TOKENS, CONTEXT = 8, 96
TABLE = target_table(TOKENS, sharpness=1.0)
PROMPT = [1, 2, 3, 1, 2, 3, 4, 1, 2]
GREEDY = SamplingParams(max_tokens=60)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=60)


@pytest.fixture(scope="module", params=[3, 1], ids=["EAGLE-3", "EAGLE-1"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp(f"eagle-{request.param}") / "bundle"
    return write_eagle_bundle(
        where, TABLE, TABLE, context=CONTEXT, turn=0.0, version=request.param, eos=()
    )


@pytest.fixture(scope="module")
def decoder(path: Path) -> Iterator[Decoder]:
    with Decoder.load(path, threads=1) as decoder:
        yield decoder


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_head_that_is_its_target_is_accepted_whole(
    decoder: Decoder, params: SamplingParams, k: int
) -> None:
    result = decoder.generate(PROMPT, params, num_draft_tokens=k)
    stats = result.stats
    assert stats.num_draft_tokens >= 30
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
    if not params.temperature:
        assert list(result.token_ids) == reference_greedy(TABLE, PROMPT, 60)


def test_the_states_of_plain_rounds_are_kept(path: Path) -> None:
    """Drafts after any number of rounds without one, in any order."""
    rounds = load_rounds(path, Bundle.load(path).manifest, EngineOptions(threads=1))
    rounds.begin(GREEDY, PROMPT)
    uniforms, tokens = uniform_table(0, CONTEXT + 8), list(PROMPT)
    tokens += rounds.prefill(tokens, uniforms).tokens
    for k in np.random.default_rng(2).integers(0, 5, 24).tolist():
        outcome = rounds.run(tokens, k, uniforms)
        assert outcome.num_accepted == outcome.num_drafted == k
        tokens += outcome.tokens
    assert tokens[len(PROMPT) :] == reference_greedy(TABLE, PROMPT, len(tokens) - len(PROMPT))


def test_the_states_of_a_kept_prefix_are_kept(tmp_path: Path) -> None:
    """A second prompt's first chunk isn't read again; its features are there."""
    where = write_eagle_bundle(tmp_path / "bundle", TABLE, TABLE, context=320, turn=0.0, eos=())
    text = np.random.default_rng(1).integers(0, TOKENS, 140).tolist()
    with Decoder.load(where, threads=1) as decoder:
        decoder.generate([*text, 1], SamplingParams(max_tokens=8), num_draft_tokens=4)
        again = decoder.generate([*text, 2], SamplingParams(max_tokens=24), num_draft_tokens=4)
    with Decoder.load(where, threads=1) as decoder:
        clean = decoder.generate([*text, 2], SamplingParams(max_tokens=24), num_draft_tokens=4)
    assert again.token_ids == clean.token_ids
    assert again.stats.acceptance_histogram == clean.stats.acceptance_histogram


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_of_a_neighbouring_row_show(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """The planted fault that the tests above would miss if they could not fail."""
    copy = FeatureStore.copy
    monkeypatch.setattr(
        FeatureStore, "copy", lambda self, start, into: copy(self, max(0, start + shift), into)
    )
    result = decoder.generate(PROMPT, GREEDY, num_draft_tokens=3)
    assert result.stats.num_accepted_draft_tokens < result.stats.num_draft_tokens / 2
    assert list(result.token_ids) == reference_greedy(TABLE, PROMPT, 60)


def test_a_trimmed_head_is_what_the_definitions_say(tmp_path: Path) -> None:
    """Against speculative sampling in NumPy, where the head knows half of the tokens."""
    kept = np.array([0, 2, 5, 6])
    head, d2t = np.ascontiguousarray(TABLE[:, kept]), kept - np.arange(len(kept))
    where = write_eagle_bundle(
        tmp_path / "bundle", TABLE, head, context=CONTEXT, turn=0.0, d2t=d2t, eos=()
    )
    expected = reference_sampled(TABLE, head, PROMPT, 60, 3, SAMPLED, kept)
    with Decoder.load(where, threads=1) as decoder:
        result = decoder.generate(PROMPT, SAMPLED, num_draft_tokens=3)
    assert list(result.token_ids) == expected
    assert result.stats.num_accepted_draft_tokens > 0


def test_a_prompt_beyond_the_window_starts_anew(tmp_path: Path) -> None:
    """The head then reads the last tokens alone; the text is the target's all the same."""
    where = write_eagle_bundle(tmp_path / "bundle", TABLE, TABLE, context=320, turn=0.0, eos=())
    prompt = np.random.default_rng(3).integers(0, TOKENS, 200).tolist()
    with Decoder.load(where, threads=1) as decoder:
        result = decoder.generate(prompt, SamplingParams(max_tokens=100), num_draft_tokens=4)
    assert list(result.token_ids) == reference_greedy(TABLE, prompt, 100)
    assert result.stats.num_draft_tokens > 100


def test_one_token_has_no_pair_to_draft_from(path: Path) -> None:
    rounds = load_rounds(path, Bundle.load(path).manifest, EngineOptions(threads=1))
    rounds.begin(GREEDY, [1])
    assert rounds.drafter is not None
    assert rounds.drafter.offer([1], 4).num_tokens == 0
    assert rounds.drafter.propose([1], 4, rounds.constraint).num_drafted == 0


def test_a_target_without_features_is_refused(tmp_path: Path) -> None:
    where = write_eagle_bundle(tmp_path / "bundle", TABLE, TABLE, context=CONTEXT, eos=())
    manifest = Bundle.load(where).manifest
    save_target(where / "onnx" / "target.onnx", TABLE, CONTEXT)
    with pytest.raises(EngineError, match="features"):
        load_rounds(where, manifest, EngineOptions(threads=1))
