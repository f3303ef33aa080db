"""One round's mask: what its rows hold, where drafting stops, and what is left between rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from helpers_grammar import Language, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.constraint import Constraint
from runtime.grammar import Grammar
from runtime.matcher import Matcher
from runtime.sequence import FinishReason

K = 4
SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "boolean"}, {"enum": ["a", "ab", "abab"]}]},
    "maxItems": 4,
}
GRAMMARS = {
    "json_schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex("(ab|a){1,9}[0-9]?"),
    "lark": Grammar.lark('start: item ("," item)*\nitem: /[ab]+/ | "(" start ")"'),
    "no way back in the library": Grammar.lark('start: w ("," w)*\nw[max_tokens=3]: /[ab]+/'),
    "dead ends": Grammar.regex("(a|ba|cz)+"),  # no token of this tokenizer spells a z
}
Choices = st.lists(st.integers(0, 10_000), min_size=K + 1, max_size=K + 1)


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Language:
    return Language(tmp_path_factory.mktemp("language"), byte_level(without="z"))


@dataclass
class Rig:
    """A constraint over a buffer, and what was generated under it."""

    language: Language
    matcher: Matcher | None = None
    banned_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allowed = np.ones((1, K + 1, self.language.vocab), np.bool_)
        self.constraint = Constraint(self.allowed)
        self.constraint.begin(
            eos_token_ids=self.language.eos,
            matcher=self.matcher,
            banned_tokens=self.banned_tokens,
            min_tokens=self.min_tokens,
        )

    def draft(self, choices: list[int]) -> list[int]:
        """A token for each choice, as long as one may follow; the row behind them is open too."""
        drafts: list[int] = []
        for choice in choices:
            if not self.constraint.open_row(len(drafts)):
                break
            drafts.append(self.choose(len(drafts), choice))
            assert self.constraint.drafted(drafts[-1])
        self.constraint.open_row(len(drafts))
        return drafts

    def choose(self, row: int, choice: int) -> int:
        allowed = np.flatnonzero(self.allowed[0, row])
        return int(allowed[choice % len(allowed)])

    def round(self, drafts: list[int], accepted: int, choice: int) -> list[int]:
        """Settle a round whose next token is one of row `accepted`; returns what it gave."""
        following = self.choose(accepted, choice)
        given_ = [*drafts[:accepted], following]
        kept = self.constraint.settle(accepted, following)
        self.tokens += given_[:kept]
        return given_[:kept]

    def cut(self, generated: int) -> None:
        """As a stop string or max_tokens in the middle of a round."""
        del self.tokens[generated:]
        self.constraint.rollback(generated)


def clean(language: Language, grammar: Grammar, tokens: list[int]) -> Matcher:
    matcher = language.matcher(grammar)
    for token in tokens:
        matcher.advance(token)
    return matcher


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=40, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.integers(0, K), Choices, st.integers(0, K)), max_size=6),
    cuts=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    min_tokens=st.integers(0, 8),
)
def test_between_rounds_it_has_read_what_was_generated(
    language: Language,
    name: str,
    rounds: list[tuple[int, list[int], int]],
    cuts: list[int],
    min_tokens: int,
) -> None:
    """Every row of every round is a fresh matcher's behind the tokens so far and the drafts."""
    rig = Rig(language, matcher=language.matcher(GRAMMARS[name]), min_tokens=min_tokens)
    for (k, choices, accepted), cut in zip(rounds, cuts, strict=False):
        if rig.constraint.finish_reason is not None:
            break
        before = list(rig.tokens)
        drafts = rig.draft(choices[:k])
        for i in range(len(drafts) + 1):
            prefix = [*before, *drafts[:i]]
            expected = expected_row(language, GRAMMARS[name], prefix, min_tokens)
            assert (rig.allowed[0, i] == expected).all()
        rig.round(drafts, min(accepted, len(drafts)), choices[-1])
        rig.cut(max(len(before), len(rig.tokens) - cut))
        check_settled(rig, GRAMMARS[name])


def expected_row(
    language: Language, grammar: Grammar, prefix: list[int], min_tokens: int
) -> np.ndarray:
    """Straight from the definition; where nothing may follow, everything (it is dropped)."""
    matcher = clean(language, grammar, prefix)
    row = language.row(matcher)
    if len(prefix) < min_tokens:
        row[list(language.eos)] = False
    over = matcher.complete or not row.any()
    return np.ones_like(row) if over else row


def check_settled(rig: Rig, grammar: Grammar) -> None:
    matcher = clean(rig.language, grammar, rig.tokens)
    assert rig.matcher is not None
    assert rig.matcher.num_tokens == len(rig.tokens)
    assert (rig.language.row(rig.matcher) == rig.language.row(matcher)).all()
    reason = rig.constraint.finish_reason
    assert (reason is FinishReason.GRAMMAR) == matcher.complete
    if matcher.dead_end:
        assert reason is FinishReason.DEAD_END


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=25, deadline=None)
@given(choices=st.lists(st.integers(0, 10_000), min_size=12, max_size=12), k=st.integers(1, K))
def test_rounds_give_what_plain_decoding_gives(
    language: Language, name: str, choices: list[int], k: int
) -> None:
    """Token n is choice n of its row, drafted, accepted or not: then so is the end, and why."""
    plain = Rig(language, matcher=language.matcher(GRAMMARS[name]))
    while plain.constraint.finish_reason is None and len(plain.tokens) < len(choices):
        plain.draft([])
        plain.round([], 0, choices[len(plain.tokens)])
    ends = {plain.constraint.finish_reason}
    rounds = Rig(language, matcher=language.matcher(GRAMMARS[name]))
    while rounds.constraint.finish_reason is None and len(rounds.tokens) < len(plain.tokens):
        at = len(rounds.tokens)
        drafts = rounds.draft(choices[at : at + min(k, len(plain.tokens) - at - 1)])
        accepted = len(drafts)
        rounds.round(drafts, accepted, choices[min(at + accepted, len(choices) - 1)])
    assert rounds.tokens == plain.tokens
    assert {rounds.constraint.finish_reason} == ends


def test_a_draft_that_completes_the_grammar_is_the_last(language: Language) -> None:
    """The bonus behind it is dropped; and its row holds everything, so that one can be drawn."""
    rig = Rig(language, matcher=language.matcher(Grammar.regex("1a")))
    drafts = rig.draft([0] * K)
    assert drafts == [language.id("1"), language.id("a")]
    assert rig.allowed[0, 2].all()
    assert rig.round(drafts, 2, 5) == drafts
    assert rig.constraint.finish_reason is FinishReason.GRAMMAR


def test_a_rejected_draft_takes_the_end_back(language: Language) -> None:
    rig = Rig(language, matcher=language.matcher(Grammar.regex("1(a|bc)")))
    rig.draft([])
    rig.round([], 0, 0)
    rig.constraint.open_row(0)
    assert rig.constraint.drafted(language.id("a"))
    assert not rig.constraint.open_row(1)
    assert rig.constraint.settle(0, language.id("b")) == 1
    assert rig.constraint.finish_reason is None
    rig.constraint.open_row(0)
    assert np.flatnonzero(rig.allowed[0, 0]).tolist() == [language.id("c")]


@pytest.mark.parametrize("eos", [0, 1])
def test_an_end_token_that_was_drafted_is_the_last(language: Language, eos: int) -> None:
    rig = Rig(language, matcher=language.matcher(Grammar.regex("a+")))
    rig.constraint.open_row(0)
    assert rig.constraint.drafted(language.id("a"))
    assert rig.constraint.open_row(1)
    assert rig.constraint.drafted(language.eos[eos])
    assert not rig.constraint.open_row(2)
    assert rig.constraint.settle(2, 0) == 2
    assert rig.constraint.finish_reason is FinishReason.GRAMMAR


def test_a_dead_end_within_the_drafts(language: Language) -> None:
    rig = Rig(language, matcher=language.matcher(Grammar.regex("1bz|1c")))
    rig.constraint.open_row(0)
    assert rig.constraint.drafted(language.id("1"))
    rig.constraint.open_row(1)
    assert rig.constraint.drafted(language.id("b"))
    assert not rig.constraint.open_row(2)
    assert rig.allowed[0, 2].all()
    assert rig.constraint.settle(2, 0) == 2
    assert rig.constraint.finish_reason is FinishReason.DEAD_END
    rig.constraint.rollback(1)
    assert rig.constraint.finish_reason is None


def test_a_draft_that_the_row_bans_is_not_followed(language: Language) -> None:
    rig = Rig(language, matcher=language.matcher(Grammar.regex("ab")))
    rig.constraint.open_row(0)
    assert not rig.constraint.drafted(language.id("c"))
    assert rig.constraint.open_row(0)
    assert rig.constraint.settle(0, language.id("a")) == 1


def test_end_tokens_are_banned_up_to_the_minimum(language: Language) -> None:
    rig = Rig(language, min_tokens=3)
    first = rig.draft([])
    rig.round(first, 0, 7)
    drafts = rig.draft([1, 2, 3, 4])
    banned = [not rig.allowed[0, i, list(language.eos)].any() for i in range(K + 1)]
    assert banned == [True, True, False, False, False]
    assert (~rig.allowed).sum() == 2 * len(language.eos)
    rig.round(drafts, 4, 0)
    rig.draft([1])
    assert rig.allowed[0, :2].all()


def test_bans_and_grammar_may_leave_nothing_together(language: Language) -> None:
    """Neither alone does: c and the end are what the grammar allows behind ab."""
    grammar = Grammar.regex("1b(c)?")
    ids = {c: language.id(c) for c in "1bc"}
    for banned, min_tokens, reason in [
        ((), 0, None),
        ((ids["c"],), 0, None),
        ((), 9, None),
        ((ids["c"],), 9, FinishReason.DEAD_END),
        ((ids["c"], *language.eos), 0, FinishReason.DEAD_END),
    ]:
        matcher = language.matcher(grammar)
        rig = Rig(language, matcher=matcher, banned_tokens=banned, min_tokens=min_tokens)
        for token in (ids["1"], ids["b"]):
            rig.constraint.open_row(0)
            assert rig.constraint.settle(0, token) == 1
        assert rig.constraint.finish_reason is reason


def test_a_complete_grammar_ends_below_the_minimum_too(language: Language) -> None:
    rig = Rig(language, matcher=language.matcher(Grammar.regex("a")), min_tokens=5)
    rig.round(rig.draft([]), 0, 0)
    assert rig.constraint.finish_reason is FinishReason.GRAMMAR


def test_a_cancelled_round_leaves_nothing(language: Language) -> None:
    rig = Rig(language, matcher=language.matcher(GRAMMARS["lark"]))
    rig.round(rig.draft([]), 0, 0)
    before = language.row(clean(language, GRAMMARS["lark"], rig.tokens))
    rig.draft([3, 1, 4])
    rig.constraint.rollback(len(rig.tokens))
    rig.constraint.open_row(0)
    assert (rig.allowed[0, 0] == before).all()


def test_where_nothing_is_asked_nothing_is_filled(language: Language) -> None:
    """And nothing of the request before is left."""
    rig = Rig(language, matcher=language.matcher(Grammar.regex("ab")), banned_tokens=(5,))
    rig.draft([0])
    assert not rig.allowed.all()
    rig.constraint.begin(eos_token_ids=language.eos)
    assert rig.allowed.all()
    assert not rig.constraint.active
    rig.allowed.flags.writeable = False
    drafts = rig.draft([language.eos[0]] * K)
    assert len(rig.round(drafts, 2, 9)) == 3
    assert rig.constraint.finish_reason is None


def test_rows_and_drafts_go_in_step(language: Language) -> None:
    constraint = Rig(language, min_tokens=1).constraint
    with pytest.raises(RuntimeError, match="in step"):
        constraint.open_row(1)
    with pytest.raises(RuntimeError, match="no row is open"):
        constraint.drafted(1)
    with pytest.raises(RuntimeError, match="rollback"):
        constraint.rollback(1)


@pytest.mark.parametrize("padding", [0, 7])
def test_a_row_of_a_batch_s_mask(tmp_path: Path, padding: int) -> None:
    """The buffer may be one sequence's part of a larger one."""
    language = Language(tmp_path, byte_level(), padding=padding)
    batch = np.ones((3, K + 1, language.vocab), np.bool_)
    constraint = Constraint(batch[1:2])
    constraint.begin(
        eos_token_ids=language.eos, matcher=language.matcher(Grammar.regex("a")), min_tokens=1
    )
    constraint.open_row(0)
    assert np.flatnonzero(batch[1, 0]).tolist() == [language.id("a")]
    assert batch[[0, 2]].all()
