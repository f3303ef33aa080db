"""Prompts in, token ids out: every layout, the default set, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from helpers_runtime import VOCAB, target_table, write_bundle

from calibration.prompts import CALIBRATION, HELD_OUT, read_prompts, text_of
from runtime.bundle import Bundle
from runtime.errors import InvalidRequest


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    table = target_table(VOCAB)
    return Bundle.load(write_bundle(tmp_path_factory.mktemp("prompts") / "tiny", table, table))


def test_the_default_set_is_there_and_licensed(bundle: Bundle) -> None:
    found = read_prompts([], None, bundle, room=10_000)
    counts = Counter(prompt.category for prompt in found.prompts)
    assert len(found.prompts) == 64
    assert len(counts) == 8
    assert set(counts.values()) == {8}
    assert found.skipped == ()
    assert "Apache-2.0" in (HELD_OUT.parent / "README.md").read_text()


def test_what_is_compared_on_was_not_calibrated_on() -> None:
    def contents(path: Path) -> set[str]:
        rows = map(json.loads, path.read_text().splitlines())
        return {row.get("prompt") or row["messages"][0]["content"] for row in rows}

    assert len(contents(HELD_OUT)) == 64
    assert contents(HELD_OUT).isdisjoint(contents(CALIBRATION))


def test_every_layout_becomes_tokens(bundle: Bundle, tmp_path: Path) -> None:
    message = {"role": "user", "content": "Hi."}
    rows = [
        {"prompt": "def f(", "category": "code"},
        {"messages": [message], "id": "chat"},
        {"question_id": 81, "category": "writing", "turns": ["Hi.", "unused"]},
        {"task_id": "HumanEval/0", "prompt": "def g("},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, chat = text_of(bundle), text_of(bundle).encode_chat([message])
    found = read_prompts([path], None, bundle, room=1000).prompts
    expected = [text.encode("def f("), chat, chat, text.encode("def g(")]
    assert [list(prompt.tokens) for prompt in found] == expected
    assert [p.category for p in found] == ["code", "mixed", "writing", "humaneval"]


def test_a_model_without_a_template_reads_the_messages_as_text(
    bundle: Bundle, tmp_path: Path
) -> None:
    table = target_table(VOCAB)
    path = write_bundle(tmp_path / "base", table, table)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["chat_template.jinja"]
    (path / "chat_template.jinja").unlink()
    (path / "manifest.json").write_text(json.dumps(manifest))
    base = Bundle.load(path)
    asked = json.loads(HELD_OUT.read_text().splitlines()[8])["messages"][0]["content"]
    found = read_prompts([], None, base, room=10_000).prompts[8]
    assert list(found.tokens) == text_of(base).encode(asked)


def test_the_limit_is_by_category_and_long_prompts_are_named(bundle: Bundle) -> None:
    found = read_prompts([], 2, bundle, room=200)
    assert max(Counter(prompt.category for prompt in found.prompts).values()) == 2
    assert len(found.prompts) + len(found.skipped) == 16
    assert all(len(prompt.tokens) <= 200 for prompt in found.prompts)
    assert any("summary" in name for name in found.skipped)


def test_an_id_twice_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n')
    with pytest.raises(InvalidRequest, match="its own id"):
        read_prompts([path], None, bundle, room=100)
