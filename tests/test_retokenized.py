"""A draft of other tokens: its text is kept up, translated and proposed, whatever the bytes are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import tokenizers
import torch
from helpers_build import target_model
from helpers_runtime import (
    BOS,
    EOS,
    byte_tokenizer,
    latency_report,
    logits_after,
    reference_greedy,
    target_table,
    write_bundle,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import tokenizer, tokens
from transformers import PreTrainedModel
from typer.testing import CliRunner

from export.certificates import contract
from export.cli import app
from runtime import Decoder, Grammar, SamplingParams
from runtime.bundle import Bundle
from runtime.draft_text import LIVE_CHARS, TAIL_CHARS, DraftText
from runtime.engine import load_rounds
from runtime.errors import BundleError
from runtime.executor import EngineOptions
from runtime.latency import LatencyProfile
from runtime.manifest import NgramDraft, NgramPlusDraft, RetokenizedDraft
from runtime.retokenized_drafter import RetokenizedDrafter
from runtime.retokenizer import WINDOW, Retokenizer, Tail
from runtime.round import Rounds
from runtime.tokenizer import Tokenizer

SIZE, MOST = 280, 4
OURS = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("l", "l"), ("he", "ll"), ("hell", "o")]
THEIRS = [("t", "h"), ("th", "e"), ("l", "o"), ("e", "l")]
BACKWARDS = list(reversed(range(256)))
TEXT = "hello the other the hello there "
EMOJI = "é 😀 ok 👩‍🚀 日本 "
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=40)


def ours() -> tokenizers.Tokenizer:
    return byte_tokenizer(SIZE, merges=OURS)


def theirs() -> tokenizers.Tokenizer:
    """Other ids, other merges, the same special tokens."""
    return byte_tokenizer(SIZE, order=BACKWARDS, merges=THEIRS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    return loaded(tmp_path_factory.mktemp("pair"), ours(), theirs())


def loaded(
    path: Path, target: tokenizers.Tokenizer, draft: tokenizers.Tokenizer
) -> tuple[Tokenizer, Tokenizer]:
    target.save(str(path / "target.json"))
    draft.save(str(path / "draft.json"))
    return Tokenizer(path / "target.json"), Tokenizer(path / "draft.json")


# The committed text in the draft's tokens

WORDS = st.sampled_from(["the ", "hello ", "é", "😀", " ", "x", "\n", "日本", "th", "el", "👩‍🚀 "])
TEXTS = st.lists(WORDS, max_size=40).map("".join)
STEPS = st.lists(st.tuples(TEXTS, st.floats(0, 1)), min_size=1, max_size=6)


@given(steps=STEPS)
@example(steps=[("ththe ", 0.5), ("el", 1.0), ("", 1.0)])
@settings(deadline=None, max_examples=200)
def test_the_drafts_ids_are_its_encoding_of_the_text(
    pair: tuple[Tokenizer, Tokenizer], steps: list[tuple[str, float]]
) -> None:
    """Token by token, taken back anywhere, within a character, too: the same as read at once."""
    target, draft = pair
    text, tokens = DraftText(target, draft), list[int]()
    for added, share in steps:
        whole_again = target.encode(target.decode(tokens).rstrip("\ufffd"))
        text.rollback(shared_length(tokens, whole_again))
        tokens = whole_again + target.encode(added)
        text.extend(tokens[text.length :])
        text.ids()
        del tokens[int(share * len(tokens)) :]
        text.rollback(len(tokens))
        assert text.length == len(tokens)
        whole = target.decode(tokens).rstrip("\ufffd")
        assert draft.decode(text.ids()) == whole
        fresh = DraftText(target, draft)
        fresh.extend(tokens)
        assert text.ids() == fresh.ids() == draft.encode(whole)


def shared_length(one: list[int], other: list[int]) -> int:
    """Of their common beginning: a text may be written in other tokens than it was read in."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def test_a_long_text_is_not_encoded_anew(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Its beginning stays; taken back behind it, all comes out right again."""
    target, draft = pair
    seen: list[int] = []

    class Counting(Tokenizer):
        def encode(self, text: str) -> list[int]:
            seen.append(len(text))
            return super().encode(text)

    counting = Counting.__new__(Counting)
    vars(counting).update(vars(draft))
    whole = (TEXT + EMOJI) * 60
    tokens, text = target.encode(whole), DraftText(target, counting)
    for end in range(0, len(tokens), 7):
        text.extend(tokens[text.length : end])
        text.ids()
    text.extend(tokens[text.length :])
    assert text.ids() == draft.encode(whole)
    assert max(seen) < TAIL_CHARS + 3 * LIVE_CHARS
    for kept in (len(tokens) - 3, len(tokens) // 2, 5):
        text.rollback(kept)
        read = target.decode(tokens[:kept]).rstrip("\ufffd")
        assert text.ids() == draft.encode(read)


def test_special_tokens_that_both_have_stay_and_others_leave(tmp_path: Path) -> None:
    """And where the draft puts a begin token before every text, it is there once."""
    draft = theirs()
    draft.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    target = ours()
    target.add_special_tokens([tokenizers.AddedToken("<only ours>", special=True)])
    one, other = loaded(tmp_path, target, draft)
    text = DraftText(one, other)
    text.extend([*one.encode("the"), EOS, SIZE, *one.encode("hello")])
    assert text.ids() == [BOS, *other.encode("the"), EOS, *other.encode("hello")]
    text.rollback(0)
    text.extend([BOS, *one.encode("the")])
    assert text.ids() == [BOS, *other.encode("the")]
    text.rollback(0)
    assert text.ids() == [BOS]


# Text in the target's tokens


def test_what_follows_is_the_targets_own_encoding(pair: tuple[Tokenizer, Tokenizer]) -> None:
    target = pair[0]
    retokenizer, ids = Retokenizer(target), target.encode("say hello")
    tail = retokenizer.tail(ids)
    assert tail == Tail(ids=ids, text="say hello")
    assert retokenizer.following(tail, " the") == target.encode(" the")


def test_a_merge_across_the_end_makes_no_continuation(pair: tuple[Tokenizer, Tokenizer]) -> None:
    target = pair[0]
    retokenizer, ids = Retokenizer(target), target.encode("say hell")
    tail = retokenizer.tail(ids)
    assert tail is not None
    assert retokenizer.following(tail, "o") is None
    assert retokenizer.following(tail, " o") == target.encode(" o")


def test_the_committed_ids_stand_as_they_are(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """'h' and 'e', which the tokenizer would have joined: only what is behind them is looked at."""
    target = pair[0]
    (h,), (e,) = target.encode("h"), target.encode("e")
    retokenizer, ids = Retokenizer(target), [*target.encode("say "), h, e]
    tail = retokenizer.tail(ids)
    assert tail == Tail(ids=[e], text="e")
    assert retokenizer.following(tail, " the") == target.encode(" the")


def test_the_rest_of_a_character_follows_its_first_bytes(
    pair: tuple[Tokenizer, Tokenizer],
) -> None:
    target = pair[0]
    ids, retokenizer = target.encode("ok 😀 the"), Retokenizer(target)
    for count in (1, 2, 3):
        tail = retokenizer.tail(ids[: 3 + count])
        assert tail == Tail(ids=ids[: 3 + count], text="ok ")
        assert retokenizer.following(tail, "😀 the") == ids[3 + count :]
        assert retokenizer.following(tail, "é the") is None


def test_bytes_that_are_no_text_have_no_tail_until_text_comes_again(
    pair: tuple[Tokenizer, Tokenizer],
) -> None:
    target = pair[0]
    broken = target.encode("😀")[1:]  # a character without its first byte
    assert Retokenizer(target).tail([*target.encode("ok "), *broken, *broken]) is None
    tail = Retokenizer(target).tail([*broken, *target.encode("ok")])
    assert tail is not None
    assert tail.text == "ok"


def test_behind_a_special_token_text_begins_anew(pair: tuple[Tokenizer, Tokenizer]) -> None:
    target = pair[0]
    retokenizer = Retokenizer(target)
    assert retokenizer.tail([*target.encode("say"), EOS]) == Tail(ids=[], text="")
    ids = target.encode("hello")
    assert retokenizer.tail([*target.encode("say"), EOS, *ids]) == Tail(ids=ids, text="hello")


def test_a_tail_is_no_longer_than_its_window(pair: tuple[Tokenizer, Tokenizer]) -> None:
    tail = Retokenizer(pair[0]).tail(pair[0].encode("x y z " * 100))
    assert tail is not None
    assert len(tail.ids) == WINDOW


# Drafting


def certain(tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
    """[states, SIZE] logits of a table model that says `text` wherever its words are."""
    table = target_table(SIZE)
    table[:, tokenizer.encode(text, add_special_tokens=False).ids] += 30.0
    return table


LIKED = "xyz the he w"  # what both like to say: ASCII, spaces and tokens of several letters
TABLE = certain(ours(), LIKED)
DRAFT = certain(theirs(), LIKED)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("retokenized") / "bundle"
    return write_bundle(path, TABLE, DRAFT, context=128, eos=(), tokenizers=(ours(), theirs()))


@pytest.fixture(scope="module")
def decoder(bundle: Path) -> Iterator[Decoder]:
    with Decoder.load(bundle, threads=1) as decoder:
        yield decoder


@pytest.fixture
def rounds(bundle: Path) -> Rounds:
    loaded = load_rounds(bundle, Bundle.load(bundle).manifest, EngineOptions(threads=1))
    loaded.begin(SAMPLED, [1])
    return loaded


def drafter_of(rounds: Rounds) -> RetokenizedDrafter:
    assert isinstance(rounds.drafter, RetokenizedDrafter)
    return rounds.drafter


def drafted(rounds: Rounds, tokens: Sequence[int], k: int = MOST) -> list[int]:
    count = drafter_of(rounds).propose(tokens, k, rounds.constraint).num_drafted
    found: list[int] = rounds.buffers.drafts(count)[0].tolist()
    return found


def expected(tokens: Sequence[int], k: int) -> list[int]:
    """From the definition: the draft's greedy text behind the text, in the target's tokens."""
    text = ours().decode(list(tokens), skip_special_tokens=False).rstrip("\ufffd")
    ids, said = theirs().encode(text, add_special_tokens=False).ids, list[int]()
    for _ in range(4 * (k + 1)):
        said.append(int(logits_after(DRAFT, [*ids, *said]).argmax()))
        whole = ours().encode(text + theirs().decode(said), add_special_tokens=False).ids
        if whole[: len(tokens)] != list(tokens):
            return []
        if len(whole) - 1 - len(tokens) >= k:
            break
    return list(whole[len(tokens) : -1][:k])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("text", ["x", "hello the", "xyz the other hello x", EMOJI + "x"])
def test_it_drafts_the_greedy_text_of_its_model(rounds: Rounds, text: str, k: int) -> None:
    tokens = ours().encode(text).ids
    found = drafted(rounds, tokens, k)
    assert found == expected(tokens, k)
    assert len(found) == k


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_token_that_more_text_could_change_is_not_drafted(tmp_path: Path, k: int) -> None:
    """A draft that says l for ever: the target joins two of them."""
    (letter,), (joined,) = theirs().encode("l").ids, ours().encode("ll").ids
    only = np.zeros((len(DRAFT), SIZE), np.float32)
    only[:, letter] = 9.0
    names = (ours(), theirs())
    path = write_bundle(tmp_path / "bundle", TABLE, only, context=128, eos=(), tokenizers=names)
    rounds = load_rounds(path, Bundle.load(path).manifest, EngineOptions(threads=1))
    rounds.begin(SAMPLED, [1])
    assert drafted(rounds, ours().encode("x").ids, k) == [joined] * k


def test_rounds_and_rollbacks_leave_a_clean_drafter(rounds: Rounds) -> None:
    """Within a character, too. The text is short enough for the draft to read all of it."""
    rng = np.random.default_rng(0)
    text = ours().encode("hello the " + EMOJI).ids
    for end in rng.integers(1, len(text), 30).tolist():
        drafter_of(rounds).rollback(end - 1)
        assert drafted(rounds, text[:end]) == expected(text[:end], MOST)


def test_it_has_to_read_only_what_is_new(rounds: Rounds) -> None:
    drafter, text = drafter_of(rounds), ours().encode("xyz the x").ids
    drafted(rounds, text)
    drafter.rollback(len(text) - 1)
    assert drafter.offer(text, MOST).unread == 1
    said = [*text, *drafted(rounds, text)[:2]]
    assert drafter.offer(said, MOST).unread <= 2


def test_no_text_is_no_offer(rounds: Rounds) -> None:
    broken = ours().encode("😀").ids[1:]
    assert drafter_of(rounds).offer([*broken, *broken], MOST).num_tokens == 0
    assert drafted(rounds, [*broken, *broken]) == []


@pytest.mark.parametrize("k", [1, 3, 4, None])
def test_the_text_is_the_targets_own(decoder: Decoder, k: int | None) -> None:
    """In every kind of text: words, characters of several tokens, special tokens."""
    for prompt in (TEXT, EMOJI, "日本", "<bos>hello<eos>the", "x"):
        tokens = decoder.encode(prompt)
        result = decoder.generate(tokens, SamplingParams(max_tokens=40), num_draft_tokens=k)
        assert list(result.token_ids) == reference_greedy(TABLE, tokens, 40)
        assert result.stats.num_draft_tokens > 10


def test_a_text_of_more_draft_tokens_than_its_cache_has_rows(decoder: Decoder) -> None:
    """60 tokens of the target are 180 of the draft, whose window starts anew."""
    tokens = decoder.encode("hello" * 60)
    assert len(tokens) == 60
    assert len(theirs().encode("hello" * 60).ids) == 180
    result = decoder.generate(tokens, SamplingParams(max_tokens=60), num_draft_tokens=3)
    assert list(result.token_ids) == reference_greedy(TABLE, tokens, 60)
    assert result.stats.num_draft_tokens > 60


def test_a_grammar_and_bans_are_obeyed(decoder: Decoder) -> None:
    pytest.importorskip("llguidance")
    grammar = SamplingParams(grammar=Grammar.regex("(x y |the ){5}"), max_tokens=40)
    result = decoder.generate("hello ", grammar, num_draft_tokens=3)
    plain = decoder.generate("hello ", grammar, num_draft_tokens=0)
    assert result.token_ids == plain.token_ids
    (x,) = ours().encode("x").ids
    banned = SamplingParams(banned_tokens=(x,), max_tokens=60, temperature=1.0, seed=2)
    result = decoder.generate("x", banned, num_draft_tokens=4)
    assert x not in result.token_ids
    assert result.stats.num_draft_tokens > 0


def test_a_draft_that_ends_ends_its_draft(tmp_path: Path) -> None:
    """Its end token, which the target has, too, is the last that it proposes."""
    ends = DRAFT.copy()
    ends[:, EOS] += 60.0
    path = write_bundle(
        tmp_path / "bundle", TABLE, ends, context=128, eos=(), tokenizers=(ours(), theirs())
    )
    rounds = load_rounds(path, Bundle.load(path).manifest, EngineOptions(threads=1))
    rounds.begin(SAMPLED, [1])
    assert drafted(rounds, ours().encode("hello").ids) == [EOS]


def test_behind_a_lookup(tmp_path: Path) -> None:
    """Both are certain of what they propose; neither leaves the other a cell."""
    names = (ours(), theirs())
    lookup = NgramDraft(min_ngram=2, max_ngram=4)
    path = write_bundle(
        tmp_path / "bundle", TABLE, DRAFT, context=128, eos=(), tokenizers=names, lookup=lookup
    )
    card = Bundle.load(path).manifest.draft
    assert isinstance(card, NgramPlusDraft)
    assert isinstance(card.other, RetokenizedDraft)
    rounds = load_rounds(path, Bundle.load(path).manifest, EngineOptions(threads=1))
    rounds.begin(SAMPLED, [1])
    assert rounds.drafter is not None
    new, old = ours().encode("xyz the").ids, ours().encode("xyz wv " * 3).ids
    for text in (new, old, new):
        rounds.drafter.rollback(0)
        found = rounds.drafter.propose(text, MOST, rounds.constraint)
        assert found.num_drafted == MOST
        assert not found.drawn
    with Decoder.load(path, threads=1) as decoder:
        tokens = decoder.encode(TEXT)
        result = decoder.generate(tokens, SamplingParams(max_tokens=60), num_draft_tokens=3)
        assert list(result.token_ids) == reference_greedy(TABLE, tokens, 60)


# What it costs, and what it needs


def test_the_start_of_a_draft_counts_once_a_round() -> None:
    report = latency_report(row=0.0, draft=0.1)
    without, given = (
        LatencyProfile.from_report(r) for r in (report, report | {"draft_start_s": 0.5})
    )
    assert given.round_s(0) == without.round_s(0)
    assert given.round_s(1) == pytest.approx(without.round_s(1) + 0.5)
    assert given.round_s(3) == pytest.approx(without.round_s(3) + 0.5)
    with pytest.raises(BundleError, match="draft_start_s"):
        LatencyProfile.from_report(report | {"draft_start_s": -1})


def test_a_bundle_without_the_drafts_tokenizer_is_refused(bundle: Path, tmp_path: Path) -> None:
    path = copytree(bundle, tmp_path / "bundle")
    (path / "draft_tokenizer.json").unlink()
    manifest = Bundle.load(bundle).manifest
    files = {n: r for n, r in manifest.files.items() if n != "draft_tokenizer.json"}
    (path / "manifest.json").write_text(replace(manifest, files=files).to_json())
    with pytest.raises(BundleError, match=r"files missing: \['draft_tokenizer\.json'\]"):
        Bundle.load(path)


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "draft_tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"draft_tokenizer\.json.*rebuild the bundle"):
        Tokenizer(tmp_path / "draft_tokenizer.json")


# A real build


def talkative() -> PreTrainedModel:
    """The tiny target, which says nothing but letters that its tokenizer never joins."""
    model = target_model()
    letters = [tokens().index(letter) for letter in "bcfgijklmopqrsuvwxyz"]
    weight = model.get_input_embeddings().weight.data
    weight[[i for i in range(len(weight)) if i not in letters]] = 0
    return model


@pytest.fixture(scope="module")
def foreign(build_root: Path, tiny_target: Path) -> tuple[Path, Path]:
    """A target, and the same model with its tokens in another order."""
    target = Path(copytree(tiny_target, build_root / "talkative"))
    model = talkative()
    model.save_pretrained(target)
    draft = Path(copytree(target, build_root / "permuted"))
    names = tokens()
    order = np.random.default_rng(1).permutation(len(names))
    tokenizer([names[i] for i in order]).save(str(draft / "tokenizer.json"))
    weight = model.get_input_embeddings().weight.data
    weight[: len(names)] = weight[: len(names)][torch.from_numpy(order)].clone()
    model.save_pretrained(draft)
    return target, draft


@pytest.fixture(scope="module")
def built(kept_traces: None, build_root: Path, foreign: tuple[Path, Path]) -> Path:
    """By the command line."""
    target, draft = foreign
    out = build_root / "retokenized"
    arguments = ["build", "--target", str(target), "--draft", str(draft), "--retokenize"]
    options = ["--precision", "fp32", "-k", str(MOST), "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    return out


def test_a_model_with_its_tokens_in_another_order_is_accepted(built: Path) -> None:
    """What the two say is the same text, so all is accepted but nothing is cut off by k."""
    with Decoder.load(built, threads=1) as decoder:
        plain = decoder.generate("kim polo", SamplingParams(max_tokens=60), num_draft_tokens=0)
        for k in (1, MOST):
            found = decoder.generate("kim polo", SamplingParams(max_tokens=60), num_draft_tokens=k)
            assert found.token_ids == plain.token_ids
            assert found.stats.acceptance_rate == 1.0
            assert found.stats.num_plain_steps == 0
    assert len(set(plain.text)) > 3


def test_what_a_build_writes_of_it(built: Path, foreign: tuple[Path, Path]) -> None:
    bundle = Bundle.load(built)
    card = bundle.manifest.draft
    assert isinstance(card, RetokenizedDraft)
    assert card.name == "permuted, in its own tokens"
    assert bundle.manifest.draft_model == card.card
    assert bundle.manifest.draft_vocab_size == bundle.manifest.target.vocab_size
    assert {gate.status for gate in bundle.manifest.gates} == {"passed"}
    own = tokenizers.Tokenizer.from_file(str(foreign[1] / "tokenizer.json")).get_vocab()
    saved = tokenizers.Tokenizer.from_file(str(built / "draft_tokenizer.json")).get_vocab()
    assert saved == own
    profile = LatencyProfile.from_report(bundle.latency or {})
    assert profile.draft_s > 5e-5  # a step of the graph
    assert profile.draft_start_s > 0
    assert contract.certify(bundle).status == "passed"
    shown = CliRunner().invoke(app, ["inspect", str(built)])
    assert "retokenized: permuted, in its own tokens" in shown.stdout
