"""What every drafter keeps, whatever its kind: a new kind needs a bundle here and nothing more.

The target has few tokens and no memory of words, so that a lookup is right by chance as often as
it is wrong; a drafter that never fits, or always does, would test little.

False alarms: the frequency certificate fails a sound drafter once in 10⁶ runs for each sampling;
all else is exact.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_eagle import write_eagle_bundle
from helpers_medusa import write_medusa_bundle
from helpers_runtime import (
    VOCAB,
    SkippedTable,
    byte_tokenizer,
    near_table,
    reference_greedy,
    write_bundle,
)
from numpy.typing import NDArray

from export.certificates import frequency, greedy
from export.certificates.target_rows import TargetRows
from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle
from runtime.drafter import Drafter, Proposal
from runtime.engine import load_rounds
from runtime.executor import EngineOptions
from runtime.grammar import Grammar
from runtime.manifest import (
    DraftCard,
    EagleDraft,
    LayerSkipDraft,
    MedusaDraft,
    ModelDraft,
    NgramDraft,
    NgramPlusDraft,
    RetokenizedDraft,
)
from runtime.outcome import Outcome
from runtime.round import Rounds
from runtime.sequence import FinishReason
from runtime.uniforms import uniform_table

TOKENS, CONTEXT = 8, 96
PROMPT = [1, 2, 3, 1, 2, 3, 4, 1, 2]
KS = (1, 2, 3, 4)


def _table() -> NDArray[Any]:
    """[states, TOKENS] logits: 5 and 6 are likely everywhere."""
    table = np.random.default_rng(5).standard_normal((61, TOKENS)).astype(np.float32)
    table[:, 5:7] += 1.0
    return table


TABLE = _table()
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=60)
GREEDY = SamplingParams(max_tokens=60)
REQUESTS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def _model(path: Path) -> Path:
    return write_bundle(path, TABLE, near_table(TABLE, 0.6), context=CONTEXT, eos=())


def _ngram(path: Path) -> Path:
    return write_bundle(path, TABLE, NgramDraft(min_ngram=1, max_ngram=3), context=CONTEXT, eos=())


def _eagle(path: Path) -> Path:
    return write_eagle_bundle(path, TABLE, near_table(TABLE, 0.6), context=CONTEXT, eos=())


def _medusa(path: Path) -> Path:
    rng = np.random.default_rng(20)  # one that is right about what the target repeats under bans
    tables = rng.standard_normal((len(TABLE), 4, TOKENS)).astype(np.float32)
    tables[..., 5:7] += 1.0
    return write_medusa_bundle(path, TABLE, tables, context=CONTEXT, eos=())


def _ngram_plus(path: Path) -> Path:
    lookup = NgramDraft(min_ngram=1, max_ngram=3)
    draft = near_table(TABLE, 0.6)
    return write_bundle(path, TABLE, draft, context=CONTEXT, eos=(), lookup=lookup)


def _retokenized(path: Path) -> Path:
    """Token i of the draft is byte 7 - i, of the first eight."""
    order = [*reversed(range(TOKENS)), *range(TOKENS, 256)]
    names = byte_tokenizer(VOCAB), byte_tokenizer(VOCAB, order=order)
    draft = np.ascontiguousarray(near_table(TABLE, 0.6)[:, ::-1])
    return write_bundle(path, TABLE, draft, context=CONTEXT, eos=(), tokenizers=names)


def _layer_skip(path: Path) -> Path:
    skipped = SkippedTable(table=near_table(TABLE, 0.6))
    return write_bundle(path, TABLE, skipped, context=CONTEXT, eos=())


#: the registry's kinds, each with a bundle of it
BUNDLES: dict[type, Callable[[Path], Path]] = {
    ModelDraft: _model,
    NgramDraft: _ngram,
    EagleDraft: _eagle,
    MedusaDraft: _medusa,
    RetokenizedDraft: _retokenized,
    NgramPlusDraft: _ngram_plus,
    LayerSkipDraft: _layer_skip,
}
KINDS = typing.get_args(DraftCard)


def test_every_kind_has_a_bundle_here() -> None:
    assert set(BUNDLES) == set(KINDS)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.kind)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    path = BUNDLES[kind](tmp_path_factory.mktemp(kind.kind) / "bundle")
    assert type(Bundle.load(path).manifest.draft) is kind
    return path


@pytest.fixture(scope="module")
def decoder(bundle: Path) -> Iterator[Decoder]:
    with Decoder.load(bundle, threads=1) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """The same target without a drafter."""
    path = tmp_path_factory.mktemp("plain") / "bundle"
    with Decoder.load(
        write_bundle(path, TABLE, None, context=CONTEXT, eos=()), threads=1
    ) as decoder:
        yield decoder


@pytest.fixture
def rounds(bundle: Path) -> Rounds:
    """Nobody else's: the tests below call its parts by hand."""
    loaded = load_rounds(bundle, Bundle.load(bundle).manifest, EngineOptions(threads=1))
    loaded.begin(SAMPLED, PROMPT)
    return loaded


def drafter_of(rounds: Rounds) -> Drafter:
    assert rounds.drafter is not None
    return rounds.drafter


def proposed(rounds: Rounds, tokens: list[int], k: int) -> tuple[list[int], NDArray[Any]]:
    """Drafts behind `tokens` and their rows of q; the constraint is left as it was.

    As between rounds, the target has read all but the last token.
    """
    rounds.target.length = 0
    if tokens[:-1]:
        rounds.target.prefill(tokens[:-1])
    rounds.buffers.set_last(tokens)
    rounds.buffers.set_uniforms(uniform_table(3, CONTEXT), len(tokens), k)
    proposal = drafter_of(rounds).propose(tokens, k, rounds.constraint)
    rounds.constraint.rollback(0)
    return rounds.buffers.drafts(proposal.num_drafted)[0].tolist(), rows_of_q(rounds, proposal)


def rows_of_q(rounds: Rounds, proposal: Proposal) -> NDArray[Any]:
    """What each draft was drawn from; of a certain one its own place."""
    count, q = proposal.num_drafted, rounds.buffers.draft_probs
    if proposal.drawn:
        return q[0, :count].copy()
    return np.eye(q.shape[2], dtype=np.float32)[rounds.buffers.drafts(count)[0]]


def outcomes(decoder: Decoder, params: SamplingParams, k: int | None) -> list[Outcome]:
    found: list[Outcome] = []
    decoder.on_round = found.append
    try:
        decoder.generate(PROMPT, params, num_draft_tokens=k)
    finally:
        decoder.on_round = None
    return found


@REQUESTS
def test_no_drafts_are_plain_decoding(
    decoder: Decoder, plain: Decoder, params: SamplingParams
) -> None:
    one, other = (d.generate(PROMPT, params, num_draft_tokens=0) for d in (decoder, plain))
    assert one.token_ids == other.token_ids
    assert one.stats.num_draft_tokens == 0


@pytest.mark.parametrize("k", KS)
def test_greedy_is_the_targets_own_text(decoder: Decoder, k: int) -> None:
    result = decoder.generate(PROMPT, GREEDY, num_draft_tokens=k)
    assert list(result.token_ids) == reference_greedy(TABLE, PROMPT, 60)
    assert 0 < result.stats.num_accepted_draft_tokens < result.stats.num_draft_tokens


@REQUESTS
@pytest.mark.parametrize("k", KS)
def test_a_round_drafts_at_most_k(decoder: Decoder, params: SamplingParams, k: int) -> None:
    found = outcomes(decoder, params, k)
    assert {o.num_drafted for o in found} <= set(range(k + 1))
    assert max(o.num_drafted for o in found) == k
    assert all(o.num_accepted <= o.num_drafted for o in found)


def test_a_proposal_is_no_longer_than_its_offer(rounds: Rounds) -> None:
    for end in range(1, len(PROMPT) + 1):
        drafter = drafter_of(rounds)
        offer = drafter.offer(PROMPT[:end], 4)
        assert 0 <= offer.num_tokens <= 4
        drafts, _ = proposed(rounds, PROMPT[:end], 4)
        assert len(drafts) <= offer.num_tokens
        if offer.tokens:  # what it says beforehand is what it does
            assert list(offer.tokens) == drafts
        chances = drafter.acceptance(None).reached(offer)
        assert len(chances) == offer.num_tokens
        assert all(1 >= a >= b >= 0 for a, b in zip([1.0, *chances], chances, strict=False))


def test_rollback_then_replay_equals_a_clean_run(rounds: Rounds) -> None:
    rng = np.random.default_rng(0)
    drafter = drafter_of(rounds)
    for kept in range(1, len(PROMPT) + 1):
        drafter.rollback(0)
        text = PROMPT[:kept]
        clean, clean_q = proposed(rounds, text, 4)
        drafter.rollback(0)
        proposed(rounds, [*text, *rng.integers(0, TOKENS, 30).tolist()], 4)
        drafter.rollback(kept - 1)
        assert drafter.length <= kept - 1
        again, again_q = proposed(rounds, text, 4)
        assert again == clean
        np.testing.assert_array_equal(again_q, clean_q)


@REQUESTS
@pytest.mark.parametrize("k", [None, *KS])
def test_lengths_agree_after_every_step(
    decoder: Decoder, params: SamplingParams, k: int | None
) -> None:
    rounds = decoder._open_rounds()
    committed = len(PROMPT)
    for chunk in decoder.stream(PROMPT, params, num_draft_tokens=k):
        committed += len(chunk.token_ids)
        assert rounds.target.length == committed - 1
        assert drafter_of(rounds).length <= committed - 1


def test_q_is_what_was_sampled_from(rounds: Rounds) -> None:
    """Uniforms on a grid draw each token as often as q says, to within a step of the grid."""
    grid, counts = 500, np.zeros(TOKENS)
    q = proposed(rounds, PROMPT, 1)[1][0]
    for i in range(grid):
        drafter_of(rounds).rollback(len(PROMPT) - 1)
        rounds.buffers.draft_uniforms[0] = (i + 0.5) / grid
        proposal = drafter_of(rounds).propose(PROMPT, 1, rounds.constraint)
        counts[rounds.buffers.block[0, 2]] += 1
        np.testing.assert_array_equal(rows_of_q(rounds, proposal)[0], q)
    assert q.sum() == pytest.approx(1, abs=1e-6)
    assert np.abs(counts / grid - q).max() <= 1 / grid


def test_every_row_of_q_is_a_distribution_that_holds_its_draft(rounds: Rounds) -> None:
    for end in range(2, len(PROMPT) + 1):
        drafts, q = proposed(rounds, PROMPT[:end], 4)
        np.testing.assert_allclose(q.sum(1), 1, atol=1e-6)
        assert (q[np.arange(len(drafts)), drafts] > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_may_not_follow_is_never_drafted(decoder: Decoder, temperature: float) -> None:
    """5 is what the target says most; behind a ban it is not even proposed."""
    rounds = decoder._open_rounds()
    drafted: list[int] = []
    decoder.on_round = lambda o: drafted.extend(rounds.buffers.drafts(o.num_drafted)[0].tolist())
    params = SamplingParams(
        temperature=temperature, banned_tokens=(5, 3), seed=1, max_tokens=60, ignore_eos=True
    )
    try:
        result = decoder.generate([*PROMPT, 5, 5, 5], params, num_draft_tokens=3)
    finally:
        decoder.on_round = None
    assert len(drafted) > 20
    assert not {5, 3} & set(drafted)
    assert not {5, 3} & set(result.token_ids)
    assert result.stats.num_accepted_draft_tokens > 0
    expected = decoder.generate([*PROMPT, 5, 5, 5], params, num_draft_tokens=0)
    assert temperature or result.token_ids == expected.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_obeyed(decoder: Decoder, temperature: float) -> None:
    """Tokens 0 … 7 are the characters ! to (: one of the first four, one of the last, in turns."""
    pytest.importorskip("llguidance")
    params = SamplingParams(
        temperature=temperature, grammar=Grammar.regex("([!-$][%-(]){12}"), seed=4, max_tokens=60
    )
    result = decoder.generate(PROMPT, params, num_draft_tokens=4)
    assert re.fullmatch("([!-$][%-(]){12}", result.text)
    assert result.finish_reason is FinishReason.GRAMMAR
    assert result.stats.num_accepted_draft_tokens > 0


@REQUESTS
@pytest.mark.parametrize("k", [None, 3])
def test_a_request_is_the_same_after_any_other(
    bundle: Path, params: SamplingParams, k: int | None
) -> None:
    """A finished one, a cancelled one, one that was refused: nothing of them is left."""
    with Decoder.load(bundle, threads=1) as decoder:
        before = decoder.generate(PROMPT, params, num_draft_tokens=k)
        decoder.generate([*PROMPT, 5, 6], SamplingParams(temperature=2, seed=1, max_tokens=20))
        with closing(decoder.stream(PROMPT[:5], SAMPLED, num_draft_tokens=4)) as cancelled:
            next(cancelled)
            next(cancelled)
        with pytest.raises(ValueError, match="token"):
            decoder.generate([TOKENS])
        after = decoder.generate(PROMPT, params, num_draft_tokens=k)
    assert after.token_ids == before.token_ids
    assert after.stats.acceptance_histogram == before.stats.acceptance_histogram


@pytest.mark.parametrize("k", KS)
def test_the_context_ends_a_text_without_a_row_beyond_it(decoder: Decoder, k: int) -> None:
    result = decoder.generate(PROMPT, num_draft_tokens=k)
    assert result.finish_reason is FinishReason.CONTEXT
    assert list(result.token_ids) == reference_greedy(TABLE, PROMPT, CONTEXT - len(PROMPT))
    nearly_full = decoder.generate([*PROMPT * 10, 1, 2, 3], num_draft_tokens=k)
    assert len(nearly_full.token_ids) == CONTEXT - 93


def test_greedy_certificate(bundle: Path) -> None:
    options = EngineOptions(threads=1, spin=False)
    rows = TargetRows(load_rounds(bundle, Bundle.load(bundle).manifest, options), CONTEXT)
    prompts = [PROMPT[:n] for n in range(2, len(PROMPT) + 1)]
    found = greedy.certify(rows, prompts, 2)
    assert found.status == "passed", found.reason


def test_frequencies_are_the_targets(decoder: Decoder, bundle: Path) -> None:
    options = EngineOptions(threads=1, spin=False)
    rows = TargetRows(load_rounds(bundle, Bundle.load(bundle).manifest, options), CONTEXT)
    found = frequency.certify(decoder, rows, PROMPT, 400)
    assert found.status == "passed", found.reason
