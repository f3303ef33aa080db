"""Lookup: the index against a search, its beliefs, its law, and what weak evidence costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from helpers_runtime import latency_report, target_table, write_bundle
from hypothesis import given, settings
from hypothesis import strategies as st

from export.certificates import law
from export.certificates.round_graphs import RoundGraphs
from export.certificates.world import CASES, Array, LawCase, Tokens, World
from runtime import Decoder, SamplingParams
from runtime.acceptance import MOST_SUPPORT, AcceptanceBySupport, prior_of_support
from runtime.buffers import RoundBuffers
from runtime.constraint import Constraint
from runtime.latency import LatencyProfile
from runtime.manifest import NgramDraft
from runtime.ngram_drafter import NgramDrafter
from runtime.ngram_index import Match, NgramIndex
from runtime.offer import Offer
from runtime.outcome import Outcome
from runtime.planner import AdaptiveDraftLength

K, VOCAB = 6, 8
FEW = st.lists(st.integers(0, 2), max_size=40)  # three tokens, so that they repeat
BOUNDS = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)


def searched(text: Sequence[int], least: int, most: int) -> Match | None:
    """What the index must find, from the definition."""
    end = len(text)
    for size in range(min(most, end), least - 1, -1):
        places = [i for i in range(size, end) if text[i - size : i] == text[end - size :]]
        if places:
            place = places[-1]
            length = size
            while length < min(place, MOST_SUPPORT) and (
                text[place - length - 1] == text[end - length - 1]
            ):
                length += 1
            disputed = len(places) > 1 and text[places[-2]] != text[place]
            return Match(end=place, length=length, disputed=disputed)
    return None


@given(text=FEW, bounds=BOUNDS)
@settings(deadline=None)
def test_the_index_finds_the_latest_place_of_the_longest_ending(
    text: list[int], bounds: list[int]
) -> None:
    index = NgramIndex(*bounds)
    for end, token in enumerate(text):
        assert index.find() == searched(text[:end], *bounds)
        index.extend([token])
    assert index.find() == searched(text, *bounds)


@given(steps=st.lists(st.tuples(FEW, st.integers(0, 40)), max_size=8), bounds=BOUNDS)
@settings(deadline=None)
def test_after_any_rollbacks_the_index_is_a_fresh_one(
    steps: list[tuple[list[int], int]], bounds: list[int]
) -> None:
    """All of it: what an entry hid comes back, and nothing of what was forgotten is left."""
    index = NgramIndex(*bounds)
    for text, kept in steps:
        index.extend(text)
        index.rollback(kept)
        assert index.length <= kept
        fresh = NgramIndex(*bounds)
        fresh.extend(index.tokens)
        assert vars(index) == vars(fresh)


def drafter(*bounds: int) -> tuple[NgramDrafter, RoundBuffers]:
    buffers = RoundBuffers(K, VOCAB, VOCAB)
    return NgramDrafter(NgramIndex(*bounds), buffers), buffers


def test_it_drafts_what_stood_behind_the_latest_place() -> None:
    one, buffers = drafter(2, 4)
    text = [1, 2, 3, 4, 5, 1, 2, 6, 7, 5, 1, 2]
    assert list(one.offer(text, 3).tokens) == [6, 7, 5]
    proposal = one.propose(text, 3, Constraint(buffers.sampling.allowed))
    assert proposal.num_drafted == 3
    assert buffers.drafts(3)[0].tolist() == [6, 7, 5]
    assert not proposal.drawn


def test_a_text_that_repeats_is_taken_to_go_on() -> None:
    one, _ = drafter(2, 4)
    assert list(one.offer([4, 1, 2, 3, 1, 2, 3, 1, 2], 6).tokens) == [3, 1, 2, 3, 1, 2]
    one.rollback(0)
    assert list(one.offer([7, 7, 7], 4).tokens) == [7, 7, 7, 7]


def test_support_grows_with_what_agrees_and_a_dispute_leaves_none() -> None:
    """However few tokens are looked up."""
    one, _ = drafter(2, 2)
    assert list(one.offer([1, 2, 3, 4, 0, 1, 2, 3], 3).support) == [3, 4, 5]
    one.rollback(0)
    assert list(one.offer([9, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], 2).support) == [5, 6]
    one.rollback(0)
    assert list(one.offer([1, 2, 3, 0, 1, 2, 4, 0, 1, 2], 2).support) == [0, 4]


# What it believes


def outcome(*tokens: int, drafted: int = 0, accepted: int = 0) -> Outcome:
    return Outcome(
        num_drafted=drafted,
        num_accepted=accepted,
        tokens=tokens,
        draft_s=0.0,
        verify_s=0.0,
        accept_s=0.0,
    )


OFFER = Offer(num_tokens=3, tokens=[5, 6, 7], support=[3, 4, 5])


def test_more_support_is_believed_more() -> None:
    belief = AcceptanceBySupport()
    chances = [belief.reached(replace(OFFER, num_tokens=1, support=[s]))[0] for s in range(30)]
    assert chances == sorted(chances)
    assert chances[0] == chances[1] == 0.0
    assert chances[-1] == chances[MOST_SUPPORT] == pytest.approx(prior_of_support(MOST_SUPPORT))
    assert chances[-1] < 1


def test_plain_rounds_teach_as_drafted_ones_do() -> None:
    plain, drafted = AcceptanceBySupport(), AcceptanceBySupport()
    for _ in range(20):
        plain.observe(OFFER, outcome(5))
        drafted.observe(OFFER, outcome(5, drafted=1, accepted=0))
    assert plain.reached(OFFER) == drafted.reached(OFFER)
    assert plain.reached(OFFER)[0] > AcceptanceBySupport().reached(OFFER)[0]


def test_a_miss_teaches_nothing_of_what_stood_behind_it() -> None:
    belief, fresh = AcceptanceBySupport(), AcceptanceBySupport()
    for _ in range(20):
        belief.observe(OFFER, outcome(5, 1, drafted=3, accepted=1))
    first, second, third = belief.reached(OFFER)
    fresh_chances = fresh.reached(OFFER)
    assert first > fresh_chances[0]
    assert second / first < fresh_chances[1] / fresh_chances[0]
    assert third / second == pytest.approx(fresh_chances[2] / fresh_chances[1])


# What it costs


@dataclass
class Texts:
    """Tokens that repeat an earlier stretch with the given chance a token."""

    copying: float
    seed: int

    def __iter__(self) -> Iterator[int]:
        rng, text, source = np.random.default_rng(self.seed), [], 0
        for _ in range(600):
            if len(text) > 20 and rng.random() < self.copying:
                source += 1
            else:
                source = int(rng.integers(0, max(1, len(text) - 2)))
                text.append(int(rng.integers(0, 300)))
                yield text[-1]
                continue
            text.append(text[min(source, len(text) - 1)])
            yield text[-1]


def cost_of(text: list[int], prompt: int, row: float) -> float:
    """Modelled seconds over plain decoding's."""
    profile = LatencyProfile.from_report(latency_report(row=row, draft=0.0, max_draft_tokens=K))
    one, _ = drafter(2, 4)
    planner = AdaptiveDraftLength(profile, one.acceptance(None), K)
    end, seconds = prompt, 0.0
    while end < len(text):
        offer = one.offer(text[:end], K)
        choice = planner.choose(offer, len(text) - end)
        k = choice.k
        fits = [a == b for a, b in zip(offer.tokens[:k], text[end:], strict=False)]
        accepted = fits.index(False) if False in fits else len(fits)
        committed = text[end : end + accepted + 1]
        planner.observe(choice, outcome(*committed, drafted=k, accepted=accepted))
        seconds += profile.round_s(k)
        end += len(committed)
    return seconds / (len(text) - prompt) / profile.round_s(0)


@pytest.mark.parametrize("row", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("copying", [0.0, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_weak_evidence_costs_next_to_nothing(copying: float, row: float) -> None:
    """Texts and seeds are fixed, the bound is on each text: 0.97 of plain decoding's speed."""
    for seed in range(4):
        assert cost_of(list(Texts(copying, seed)), 100, row) < 1 / 0.97


def test_copied_text_pays() -> None:
    assert cost_of(list(Texts(0.97, 0)), 100, 0.25) < 0.6


def test_a_decoder_leaves_lookup_alone_where_the_text_never_repeats(tmp_path: Path) -> None:
    """And takes it up where it does; greedy text is the same either way."""
    report = latency_report(row=0.25, draft=0.0)
    draft = NgramDraft(min_ngram=2, max_ngram=4)
    path = write_bundle(tmp_path / "bundle", target_table(258), draft, latency=report, eos=())
    with Decoder.load(path, threads=1) as decoder:
        stats = decoder.generate(list(range(40)), SamplingParams(max_tokens=50)).stats
        assert stats.num_draft_tokens < 8
    constant = target_table(258)
    constant[:] = constant[0]
    path = write_bundle(tmp_path / "copies", constant, draft, latency=report, eos=())
    with Decoder.load(path, threads=1) as decoder:
        result = decoder.generate([1, 2, 3], SamplingParams(max_tokens=50))
        assert result.stats.mean_acceptance_length > 4
        again = decoder.generate([1, 2, 3], SamplingParams(max_tokens=50), num_draft_tokens=0)
        assert result.token_ids == again.token_ids


# Its law


@dataclass(frozen=True, kw_only=True)
class OneHotWorld(World):
    """The draft is certain of one token behind each prefix, likely or not."""

    def draft_logits(self, prefix: Tokens) -> Array:
        row = np.full(self.vocab, -np.inf, np.float32)
        row[self._rng(prefix, stream=4).integers(self.vocab)] = 0.0
        return row


@pytest.mark.parametrize("case", [c for c in CASES if not c.masked], ids=lambda case: case.name)
def test_law_of_a_round_with_one_hot_drafts_is_the_targets(case: LawCase) -> None:
    """Behind a mask a lookup doesn't draft what it bans: the round is then a shorter one."""
    for seed in range(3):
        world = OneHotWorld(vocab=4, k=2, seed=seed)
        graphs = replace(RoundGraphs.small(world), draft_session=None)
        assert law.distance(case, world, graphs) <= law.LIMIT
