"""Text in and out: characters over token borders, stop strings over rounds, chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_runtime import EOS, VOCAB, byte_tokenizer, target_table, write_bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from runtime import BundleError, Decoder, InvalidRequest, SamplingParams
from runtime.chat_template import compile_template, render
from runtime.detokenizer import Detokenizer
from runtime.sequence import FinishReason, Sequence
from runtime.stops import Committer, Ends, StopStrings
from runtime.text import Text

TOKENIZER = byte_tokenizer(VOCAB)


class Codec:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def decode(self, ids: object) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


CODEC = Codec(TOKENIZER)


def pieces(codec: Codec, tokens: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(codec, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.text(max_size=40), st.text(max_size=5))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str, prompt: str) -> None:
    got = pieces(CODEC, CODEC.encode(text), CODEC.encode(prompt))
    assert "".join(got) == text
    assert all("\ufffd" not in piece for piece in got) or "\ufffd" in text


@given(st.lists(st.integers(0, VOCAB - 1), max_size=60))
def test_bytes_that_are_no_text_join_to_the_decoders_own(tokens: list[int]) -> None:
    """Long runs of them are told in parts, each with its own replacement characters."""
    joined = "".join(pieces(CODEC, tokens, []))
    assert joined.replace("\ufffd", "") == CODEC.decode(tokens).replace("\ufffd", "")


def test_a_character_is_held_back_until_it_is_whole() -> None:
    assert pieces(CODEC, CODEC.encode("aé😀"), []) == ["a", "", "é", "", "", "", "😀", ""]


def test_an_incomplete_character_at_the_end_is_told_as_the_decoder_does() -> None:
    assert pieces(CODEC, CODEC.encode("a😀")[:-1], []) == ["a", "", "", "", "\ufffd"]


def test_the_first_word_keeps_its_space() -> None:
    """Decoders of the sentencepiece kind drop a leading space of what they decode."""
    vocab = {"▁Hello": 0, "▁world": 1, "▁!": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    assert pieces(Codec(tokenizer), [1, 2], [0]) == [" world", " !", ""]
    assert pieces(Codec(tokenizer), [1, 2], []) == ["world", " !", ""]


def test_a_window_stays_small() -> None:
    """The cost of a token does not grow with the text."""
    seen = []

    class Counting(Codec):
        def decode(self, ids: object) -> str:
            seen.append(len(list(ids)))  # type: ignore[call-overload]
            return super().decode(ids)

    pieces(Counting(TOKENIZER), CODEC.encode("some text é " * 50) + [200] * 100, [])
    assert max(seen) <= 16


def push_all(stops: tuple[str, ...], parts: list[str]) -> tuple[str, bool]:
    strings = StopStrings(stops)
    told = ""
    for part in parts:
        text, stopped = strings.push(part)
        told += text
        if stopped:
            return told, True
    return told + strings.flush(), False


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text, stops, random) -> None:
    cuts = sorted(random.sample(range(len(text) + 1), min(5, len(text) + 1)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    told, stopped = push_all(tuple(stops), parts)
    assert text.startswith(told)
    assert not any(stop in told for stop in stops)
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert told == text


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    strings = StopStrings(["\n\n", "END"])
    assert [strings.push(p) for p in ("a\n", "b", "EN", "C")] == [
        ("a", False),
        ("\nb", False),
        ("", False),
        ("ENC", False),
    ]
    assert strings.push("E") == ("", False)
    assert strings.push("NDLESS") == ("", True)


def commit_rounds(rounds: list[str], **ends: object) -> tuple[list[str], Sequence]:
    sequence = Sequence(CODEC.encode("p"))
    defaults = {
        "eos_token_ids": frozenset({EOS}),
        "ignore_eos": False,
        "max_tokens": None,
        "max_context": 1000,
        "stop": (),
    }
    checked = Ends(**(defaults | ends))  # type: ignore[arg-type]
    committer = Committer(sequence, checked, Detokenizer(CODEC))
    told = []
    for text in rounds:
        told.append(committer.commit(CODEC.encode(text))[1])
        if sequence.finish_reason:
            break
    return told, sequence


def test_a_stop_string_over_two_rounds() -> None:
    told, sequence = commit_rounds(["one S", "TOP two"], stop=("STOP",))
    assert told == ["one ", ""]
    assert sequence.finish_reason is FinishReason.STOP
    assert CODEC.decode(sequence.generated) == "one STOP"  # the tokens that spell it are there


def test_held_text_is_let_go_at_another_end() -> None:
    told, sequence = commit_rounds(["one S", "T<eos>OP"], stop=("STOP",))
    assert told == ["one ", "ST"]
    assert sequence.finish_reason is FinishReason.EOS
    told, sequence = commit_rounds(["one STOP"], stop=("STOP",), max_tokens=6)
    assert told == ["one ST"]
    assert sequence.finish_reason is FinishReason.LENGTH


def test_a_stop_string_on_the_last_token_is_a_stop() -> None:
    told, sequence = commit_rounds(["STOP"], stop=("STOP",), max_tokens=4)
    assert (told, sequence.finish_reason) == ([""], FinishReason.STOP)


def test_streams_hold_back_and_cut_on_a_real_bundle(tmp_path: Path) -> None:
    table = target_table(VOCAB)
    table[:, 256:] = -50.0
    table[:, :33] = -50.0  # what is left are mostly printable bytes
    table[:, 94:] = -50.0
    with Decoder.load(write_bundle(tmp_path / "bundle", table, table), threads=1) as decoder:
        text = decoder.generate("hi", SamplingParams(max_tokens=30), num_draft_tokens=0).text
        assert len(text) == 30
        stop = text[9:13]
        at = text.index(stop)
        for k in (0, 1, 3, 4):
            params = SamplingParams(max_tokens=30, stop=(stop,))
            chunks = list(decoder.stream("hi", params, num_draft_tokens=k))
            assert "".join(c.text for c in chunks) == text[:at]
            assert sum(len(c.token_ids) for c in chunks) == at + 4
            assert chunks[-1].finish_reason is FinishReason.STOP
            assert decoder.stats is not None
            assert decoder.stats.target_rows == 2 + at + 4 - 1


def test_chat_messages_go_through_the_models_template(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "bundle", target_table(VOCAB), None)
    with Decoder.load(path, threads=1) as decoder:
        ids = decoder.encode([{"role": "user", "content": "<b>é</b>"}])
    assert CODEC.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<bos>user\n<b>é</b><eos>\n<bos>assistant\n"
    )


def test_templates_follow_hugging_faces_conventions() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'tool' %}\n{{ raise_exception('no tools') }}{% endif %}\n"
        "{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    )
    template = compile_template(source)
    said = [{"role": "user", "content": "<é>"}]
    assert render(template, said, {"bos_token": "<s>"}) == '<s>{"role": "user", "content": "<é>"}'
    with pytest.raises(InvalidRequest, match="no tools"):
        render(template, [{"role": "tool"}], {})
    with pytest.raises(InvalidRequest, match=r"messages\[0\]"):
        render(template, [{"content": "x"}], {})


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].update(a=1) }}"],
)
def test_templates_are_sandboxed(source: str) -> None:
    with pytest.raises(InvalidRequest, match="refused"):
        render(compile_template(source), [{"role": "user", "content": ""}], {})


def test_a_broken_template_or_none() -> None:
    with pytest.raises(BundleError, match="chat_template"):
        compile_template("{% if %}")


def test_a_model_without_a_template_or_tokenizer(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    text = Text(tmp_path / "tokenizer.json", None, None, [EOS])
    with pytest.raises(InvalidRequest, match="no chat template"):
        text.render([{"role": "user", "content": ""}])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        Text(tmp_path / "tokenizer.json", None, None, [EOS])
