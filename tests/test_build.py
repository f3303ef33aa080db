"""Whole builds of tiny models: what a bundle promises holds when it is decoded from."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_build import (
    DRAFT_POSITIONS,
    KEPT,
    POSITIONS,
    TEMPLATE,
    K,
    build_bundle,
    places,
    target_model,
)
from tiny_checkpoints import VOCAB
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from export import gates
from export.build import BuildRequest, build
from export.certificates import law
from export.certificates.check import Effort, check
from export.cli import app
from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle
from runtime.errors import InvalidRequest, LimitExceeded
from runtime.manifest import NgramDraft
from runtime.outcome import Outcome

PROMPTS = ("def mean(values):", "the hand", "Water boils at 100")
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=50, seed=5, max_tokens=40, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}


def opened(path: Path) -> Iterator[Decoder]:
    with Decoder.load(path, spin=False) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def own_draft(own_draft_bundle: Path) -> Iterator[Decoder]:
    yield from opened(own_draft_bundle)


@pytest.fixture(scope="module")
def fp32(fp32_bundle: Path) -> Iterator[Decoder]:
    yield from opened(fp32_bundle)


@pytest.fixture(scope="module")
def int4(int4_bundle: Path) -> Iterator[Decoder]:
    yield from opened(int4_bundle)


@pytest.fixture(scope="module")
def plain_bundle(kept_traces: None, build_root: Path, tiny_target: Path) -> Path:
    """No draft, f32, on a machine without the memory for the eager model."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gates, "available_bytes", lambda: 100_000)
        return build(
            BuildRequest(
                target=str(tiny_target), draft=None, out=build_root / "plain", precision="fp32"
            )
        )


@pytest.fixture(scope="module")
def plain(plain_bundle: Path) -> Iterator[Decoder]:
    yield from opened(plain_bundle)


def tokens(
    decoder: Decoder, prompt: str, params: SamplingParams, k: int | None = None
) -> tuple[int, ...]:
    return decoder.generate(prompt, params, num_draft_tokens=k).token_ids


# Invariants


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_target_that_is_its_own_draft_accepts_everything(
    own_draft: Decoder, prompt: str, kind: str
) -> None:
    stats = own_draft.generate(prompt, PARAMS[kind], num_draft_tokens=K).stats
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
    assert stats.acceptance_rate == 1


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_drafts_is_plain_decoding(
    own_draft: Decoder, fp32: Decoder, plain: Decoder, prompt: str, kind: str
) -> None:
    expected = tokens(plain, prompt, PARAMS[kind])
    assert len(expected) == GREEDY.max_tokens
    assert tokens(own_draft, prompt, PARAMS[kind], 0) == expected
    assert tokens(fp32, prompt, PARAMS[kind], 0) == expected


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_the_same_with_and_without_a_draft(
    own_draft: Decoder, fp32: Decoder, prompt: str
) -> None:
    expected = tokens(fp32, prompt, GREEDY, 0)
    for k in (1, 2, K, None):
        assert tokens(fp32, prompt, GREEDY, k) == expected
    assert tokens(own_draft, prompt, GREEDY, K) == expected


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_that_of_transformers(fp32: Decoder, tiny_target: Path, prompt: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_target, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None  # go on past it
    ids = torch.tensor([fp32.encode(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=GREEDY.max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    assert tokens(fp32, prompt, GREEDY, K) == tuple(out[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("name", ["fp32", "int4"])
def test_a_distilled_draft_is_right_now_and_then(request: pytest.FixtureRequest, name: str) -> None:
    """Both branches of a round are taken: or the tests above would say little."""
    decoder = request.getfixturevalue(name)
    stats = [
        decoder.generate(p, params, num_draft_tokens=K).stats
        for p in PROMPTS
        for params in PARAMS.values()
    ]
    rates = [s.acceptance_rate for s in stats]
    assert 0.05 < np.mean(rates) < 0.95, rates


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", ["fp32", "int4"])
def test_streaming_and_repeating_give_the_same(
    request: pytest.FixtureRequest, name: str, kind: str
) -> None:
    decoder: Decoder = request.getfixturevalue(name)
    once = decoder.generate(PROMPTS[0], PARAMS[kind], num_draft_tokens=3)
    chunks = list(decoder.stream(PROMPTS[0], PARAMS[kind], num_draft_tokens=3))
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == once.token_ids
    assert "".join(chunk.text for chunk in chunks) == once.text
    assert chunks[-1].finish_reason == once.finish_reason == "length"
    assert once.text == decoder.decode(list(once.token_ids))


def test_another_seed_gives_other_tokens(int4: Decoder) -> None:
    found = {
        tokens(int4, PROMPTS[1], SamplingParams(temperature=1.0, seed=seed, max_tokens=20), 2)
        for seed in range(4)
    }
    assert len(found) == 4


def test_a_draft_with_fewer_positions_drafts_past_them(fp32: Decoder, fp32_bundle: Path) -> None:
    """Its cache starts anew when it is full; the target's holds the whole context."""
    manifest = Bundle.load(fp32_bundle).manifest
    assert manifest.draft_model is not None
    assert manifest.draft_model.cache.max_context == DRAFT_POSITIONS
    assert manifest.limits.max_context == manifest.target.cache.max_context == POSITIONS
    params = SamplingParams(ignore_eos=True)
    prompt = PROMPTS[0]
    expected = tokens(fp32, prompt, params, 0)
    rounds: list[Outcome] = []
    fp32.on_round = rounds.append
    try:
        result = fp32.generate(prompt, params, num_draft_tokens=K)
    finally:
        fp32.on_round = None
    assert result.token_ids == expected
    assert result.finish_reason == "context"
    assert len(fp32.encode(prompt)) + len(expected) == POSITIONS
    late = rounds[-12:-6]  # far past the draft's positions, before the end cuts k
    assert [r.num_drafted for r in late] == [K] * len(late)
    assert sum(r.num_accepted for r in rounds[len(rounds) // 2 :]) > 0


# Requests at the door


@pytest.mark.slow  # a trace of its own
def test_a_draft_padded_beyond_its_target_never_drafts_padding(
    kept_traces: None, build_root: Path, tiny_target: Path
) -> None:
    """Its padding's rows are large, so it is likely at random; the target couldn't read it."""
    padded = shutil.copytree(tiny_target, build_root / "padded")
    model = target_model()
    model.resize_token_embeddings(VOCAB + 13, mean_resizing=False)
    weight = model.get_input_embeddings().weight
    weight.data[VOCAB:] = 3 * weight.data[:13].flip(0)
    model.save_pretrained(padded)
    path = build_bundle(build_root / "padded-draft", tiny_target, padded, "fp32")
    gate = next(g for g in Bundle.load(path).manifest.gates if g.name == "draft parity")
    assert gate.status == "passed"
    with Decoder.load(path, spin=False) as decoder:
        for params in (GREEDY, SAMPLED, replace(SAMPLED, banned_tokens=(3,), temperature=2.0)):
            stats = decoder.generate(PROMPTS[0], params, num_draft_tokens=K).stats
            assert stats.acceptance_rate == 1.0  # what is left of its q is the target's p


def test_limits_name_what_to_rebuild_with(int4: Decoder) -> None:
    with pytest.raises(LimitExceeded, match=rf"received {K + 1}\. .* at most {K}.*-k {K + 1}"):
        int4.generate("a", num_draft_tokens=K + 1)
    with pytest.raises(LimitExceeded, match=rf"at most {POSITIONS}.*--max-context {POSITIONS + 1}"):
        int4.generate([97] * POSITIONS)
    with pytest.raises(InvalidRequest, match=f"0 to {VOCAB - 1}"):
        int4.generate([VOCAB])


def test_a_bundle_without_a_draft_says_so(plain: Decoder, plain_bundle: Path) -> None:
    manifest = Bundle.load(plain_bundle).manifest
    assert manifest.draft is None
    assert manifest.limits.max_draft_tokens == 0
    assert not (plain_bundle / "onnx" / "draft.onnx").exists()
    with pytest.raises(InvalidRequest, match="no draft; rebuild it with --draft"):
        plain.generate("a", num_draft_tokens=1)


@pytest.fixture(scope="module")
def lookup_bundle(kept_traces: None, build_root: Path, tiny_target: Path) -> Path:
    """Lookup in place of a draft model, by the command line."""
    out = build_root / "lookup"
    arguments = ["build", "--target", str(tiny_target), "--draft", "ngram", "--precision", "fp32"]
    bounds = ["--min-ngram", "1", "-k", str(K)]
    result = CliRunner().invoke(app, [*arguments, *bounds, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


def test_a_bundle_with_lookup(lookup_bundle: Path, plain: Decoder) -> None:
    """No draft graph; the same text as plain decoding, with drafts accepted."""
    manifest = Bundle.load(lookup_bundle).manifest
    assert manifest.draft == NgramDraft(min_ngram=1, max_ngram=4)
    assert manifest.draft_vocab_size == VOCAB
    assert not (lookup_bundle / "onnx" / "draft.onnx").exists()
    assert not [gate for gate in manifest.gates if gate.name.startswith("draft")]
    shown = CliRunner().invoke(app, ["inspect", str(lookup_bundle)])
    assert "ngram: n-grams of 1 to 4 tokens" in shown.stdout
    with Decoder.load(lookup_bundle, spin=False) as decoder:
        for k in (None, 0, K):
            assert tokens(decoder, "aaaa bbb aaaa", GREEDY, k) == tokens(
                plain, "aaaa bbb aaaa", GREEDY
            )
        stats = decoder.generate("aaaa bbb aaaa", GREEDY, num_draft_tokens=K).stats
        assert stats.num_accepted_draft_tokens > 0


def test_certificates_of_a_bundle_with_lookup(
    lookup_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All four; the law of other worlds has tests of its own. Odds of a false alarm: 2 in 10⁶."""
    monkeypatch.setattr(law, "SMALL", {})
    found = check(lookup_bundle, Effort(prompts=10, samples=100))
    assert {one.name: (one.status, one.reason) for one in found if one.status != "passed"} == {}


def test_chat_messages_go_through_the_models_template(fp32: Decoder, tiny_target: Path) -> None:
    messages = [{"role": "user", "content": "the hand"}]
    text = "<|begin|>the hand<|im_end|><|begin|>"
    assert "add_generation_prompt" in TEMPLATE
    expected = Tokenizer.from_file(str(tiny_target / "tokenizer.json")).encode(text).ids
    assert fp32.encode(messages) == expected
    result = fp32.generate(messages, GREEDY, num_draft_tokens=K)
    assert result.token_ids == fp32.generate(expected, GREEDY, num_draft_tokens=0).token_ids


# What is in the bundle


@pytest.mark.parametrize(
    ("bundle", "parts"),
    [
        ("fp32_bundle", {""}),
        ("int4_bundle", {".codes.table", ".scales"}),
    ],
)
def test_the_shared_embedding_is_stored_once(
    request: pytest.FixtureRequest, bundle: str, parts: set[str]
) -> None:
    path: Path = request.getfixturevalue(bundle) / "onnx"
    target, draft = places(path / "target.onnx"), places(path / "draft.onnx")
    borrowed = {name: place for name, place in draft.items() if place[0] == "target.data"}
    assert set(borrowed) == {f"model.embed_tokens.weight{part}" for part in parts}
    assert set(borrowed.values()) <= set(target.values())
    own = [place for place in draft.values() if place[0] == "draft.data"]
    assert (path / "draft.data").stat().st_size == max(start + size for _, start, size in own)
    embedding = sum(size for _, _, size in borrowed.values())
    assert min(size for _, _, size in own) < embedding
    assert embedding not in {size for _, _, size in own}


def test_the_tied_head_reads_the_embeddings_codes(int4_bundle: Path) -> None:
    found = places(int4_bundle / "onnx" / "target.onnx")
    assert found["lm_head.weight.codes"] == found["lm_head.weight.codes.table"]


def test_precisions_differ_in_size(fp32_bundle: Path, int4_bundle: Path) -> None:
    sizes = [
        sum(size for _, _, size in places(path / "onnx" / "target.onnx").values())
        for path in (fp32_bundle, int4_bundle)
    ]
    assert sizes[1] < sizes[0] / 4


def test_the_map_is_in_the_bundle(int4_bundle: Path) -> None:
    d2t = Bundle.load(int4_bundle).d2t
    assert d2t is not None
    np.testing.assert_array_equal(d2t + np.arange(len(d2t)), KEPT)


@pytest.mark.parametrize("bundle", ["own_draft_bundle", "fp32_bundle", "int4_bundle"])
def test_every_gate_is_recorded_with_its_figures(
    request: pytest.FixtureRequest, bundle: str
) -> None:
    found = Bundle.load(request.getfixturevalue(bundle)).manifest.gates
    names = ["target parity", "rows", "engine", "rollback", "draft parity"]
    assert [gate.name for gate in found] == names
    for gate in found:
        assert (gate.status, gate.reason) == ("passed", "")
        assert gate.figures
        assert all(math.isfinite(value) for value in gate.figures.values())
        if "limit" in gate.figures:
            assert 0 <= gate.figures["relative_error"] <= gate.figures["limit"]
    for name in ("target parity", "draft parity"):
        figures = next(gate for gate in found if gate.name == name).figures
        exact = bundle != "int4_bundle"
        assert figures["drift_top1_agreement"] == 1 or not exact
        assert (figures["drift_kl"] < 1e-6) == exact


def test_parity_is_skipped_with_the_reason_where_memory_lacks(plain_bundle: Path) -> None:
    found = {gate.name: gate for gate in Bundle.load(plain_bundle).manifest.gates}
    assert list(found) == ["target parity", "rows", "engine", "rollback"]
    parity = found.pop("target parity")
    assert parity.status == "skipped"
    assert "needs 0.0 GB of memory, 0.0 GB are free" in parity.reason
    assert all(gate.status == "passed" for gate in found.values())


def test_inspect(int4_bundle: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["inspect", str(int4_bundle), "--json"])
    assert result.exit_code == 0, result.output
    raw = json.loads(result.stdout)
    manifest = Bundle.load(int4_bundle).manifest
    assert raw["limits"] == {
        "max_batch": 1,
        "max_context": POSITIONS,
        "max_draft_tokens": K,
        "max_tree_nodes": 0,
    }
    assert [gate["name"] for gate in raw["gates"]] == [gate.name for gate in manifest.gates]
    assert [row["k"] for row in raw["predicted_speedup"]] == [1, 2, 3, 4]
    result = runner.invoke(app, ["inspect", str(int4_bundle)])
    assert result.exit_code == 0, result.output
    for text in ("target parity", "drift_kl", "onnx/target.onnx", "int4", "128 tokens"):
        assert text in result.stdout


def test_build_by_command_line(kept_traces: None, build_root: Path, tiny_target: Path) -> None:
    """--json: one line on stdout, the same as inspect's; everything else on stderr.

    With the smallest context there is: the gates still find room for their rows.
    """
    out = build_root / "by-command"
    arguments = ["build", "--target", str(tiny_target), "--out", str(out), "--json"]
    result = CliRunner().invoke(app, [*arguments, "--max-context", "16"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    raw = json.loads(line)
    assert (raw["target"]["precision"], raw["draft"]) == ("int8", None)
    assert raw["limits"]["max_context"] == 16
    assert "checking the graphs against the checkpoints" in result.stderr
    again = CliRunner().invoke(app, ["inspect", str(out), "--json"])
    assert json.loads(again.stdout) == raw
