"""The target as its own draft: the built graph, the rows that drafts leave, the search."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx_ir as ir
import pytest
from helpers_build import POSITIONS, K
from tiny_checkpoints import VOCAB
from typer.testing import CliRunner

from engines.external_data import WeightStore, save
from engines.onnxruntime.lowering import make_skippable
from engines.onnxruntime.skip_layers import SkipLayersPass
from engines.residual_stream import layer_inputs
from export import layer_skip_draft
from export.certificates import law
from export.certificates.check import Effort, check
from export.cli import app
from export.draft_tail import tail_model
from export.layer_search import Layers, LayerSearch, Score, StepCosts, ceiling, score
from export.layer_skip_draft import parse_layers
from export.layer_trial import _open as open_search
from export.layer_trial import choose_layers
from export.special_tokens import SpecialTokens
from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle
from runtime.engine import load_rounds
from runtime.errors import BuildError, BundleError, UnsupportedModel
from runtime.executor import EngineOptions
from runtime.layer_runs import as_text, runs
from runtime.manifest import LayerSkipDraft
from runtime.round import Rounds
from runtime.uniforms import uniform_table

PROMPT = "def mean(values):"
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=50, seed=5, max_tokens=40, ignore_eos=True)
TOKENS = np.random.default_rng(1).integers(3, 250, 40).tolist()


def build(target: Path, out: Path, *arguments: str) -> Path:
    command = ["build", "--target", str(target), "--out", str(out), "-k", str(K), *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def bundle(kept_traces: None, build_root: Path, tiny_target: Path) -> Path:
    """Without layer 0, so that the rows which drafts leave in layer 1 are far from exact."""
    out = build_root / "layer-skip"
    return build(tiny_target, out, "--draft", "layer-skip", "--skip-layers", "0")


@pytest.fixture(scope="module")
def plain(kept_traces: None, build_root: Path, tiny_target: Path) -> Path:
    return build(tiny_target, build_root / "layer-skip-plain")


@pytest.fixture(scope="module")
def decoder(bundle: Path) -> Iterator[Decoder]:
    with Decoder.load(bundle, spin=False, threads=1) as decoder:
        yield decoder


def load(bundle: Path) -> Rounds:
    options = EngineOptions(threads=1, spin=False)
    rounds = load_rounds(bundle, Bundle.load(bundle).manifest, options)
    rounds.begin(SAMPLED, TOKENS)
    return rounds


def rows_of(rounds: Rounds, layer: int, count: int) -> np.ndarray:
    return rounds.target.caches[f"past_key_values.{layer}.key"][0, :, :count].copy()


# The bundle


def test_nothing_is_there_twice(bundle: Path, plain: Path) -> None:
    """The graph of the plain bundle's weights, and a tail that is as long as a vocabulary."""
    manifest = Bundle.load(bundle).manifest
    assert manifest.draft == LayerSkipDraft(skipped_layers=(0,))
    files = {path.name: path.stat().st_size for path in (bundle / "onnx").iterdir()}
    assert files["target.data"] == (plain / "onnx" / "target.data").stat().st_size
    assert set(files) == {"target.onnx", "target.data", "tail.onnx", "tail.data"} | {
        path.name for path in (plain / "onnx").glob("accept.*")
    }
    assert {gate.name: gate.status for gate in manifest.gates}["draft parity"] == "passed"
    shown = CliRunner().invoke(app, ["inspect", str(bundle)])
    assert "layer-skip: the target without layers 0" in shown.stdout


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_drafts_are_the_plain_bundle(
    decoder: Decoder, plain: Path, params: SamplingParams
) -> None:
    """Nothing skipped is the same arithmetic, and nobody needs to say that nothing is."""
    with Decoder.load(plain, spin=False, threads=1) as other:
        expected = other.generate(PROMPT, params).token_ids
    assert decoder.generate(PROMPT, params, num_draft_tokens=0).token_ids == expected


@pytest.mark.parametrize("k", [1, K, None])
def test_greedy_text_is_the_plain_text(decoder: Decoder, k: int | None) -> None:
    plain = decoder.generate(PROMPT, GREEDY, num_draft_tokens=0)
    assert decoder.generate(PROMPT, GREEDY, num_draft_tokens=k).token_ids == plain.token_ids


def test_certificates(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four; the law of other worlds has tests of its own. Odds of a false alarm: 2 in 10⁶."""
    monkeypatch.setattr(law, "SMALL", {})
    found = check(bundle, Effort(prompts=10, samples=100, spin=False))
    assert {one.name: (one.status, one.reason) for one in found if one.status != "passed"} == {}


# The graph


def lowered(plain: Path) -> ir.Model:
    return ir.load(plain / "onnx" / "target.onnx")


def test_layers_meet_where_the_next_norm_reads(plain: Path) -> None:
    """x_0 is the embedding, and each x_i is read by a norm with the next layer's weight."""
    stream = layer_inputs(lowered(plain))
    assert len(stream) == 3
    norms = [use.node for use in stream[0].uses() if "Norm" in use.node.op_type]
    norms += [x.producer() for x in stream[1:]]
    weights = [
        next(v.name for v in norm.inputs if v is not None and "weight" in str(v.name))
        for norm in norms
        if norm is not None
    ]
    first = {f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")}
    assert set(weights[:-2]) <= first
    assert weights[-2:] == ["model.layers.1.input_layernorm.weight", "model.norm.weight"]


def test_no_layers_are_no_change(plain: Path) -> None:
    model = lowered(plain)
    assert not SkipLayersPass([])(model).modified
    assert "If" not in {node.op_type for node in model.graph}


def test_a_layer_that_others_look_into_is_refused(plain: Path) -> None:
    """An output from inside a layer would be lost with it."""
    model = lowered(plain)
    (inner, *_) = [node for node in model.graph if node.op_type == "QuickGelu"]
    model.graph.outputs.append(inner.outputs[0])
    with pytest.raises(BuildError, match=r"SkipLayersPass: .* is read behind it"):
        make_skippable(model, [0])


def test_layers_that_do_not_add_are_refused(plain: Path) -> None:
    """As in models that normalise behind each addition."""
    model = lowered(plain)
    embedded = layer_inputs(model)[0]
    for norm in [n for n in model.graph if n.op_type == "SkipSimplifiedLayerNormalization"]:
        norm.outputs[3].replace_all_uses_with(norm.outputs[0])
    assert embedded.uses()
    with pytest.raises(UnsupportedModel, match="Expected a hidden state that each layer adds to"):
        make_skippable(model, [0])


# The rows that drafts leave


def test_verification_overwrites_every_row_that_a_draft_wrote(bundle: Path) -> None:
    """Bit for bit those of a run that never drafted, in every layer, whatever is accepted."""
    rounds, clean = load(bundle), load(bundle)
    uniforms = uniform_table(3, POSITIONS)
    tokens, committed = list(TOKENS), len(TOKENS)
    for one in (rounds, clean):
        one.target.prefill(tokens[:-1])
    exact = rows_of(rounds, 1, committed + K)
    rounds.buffers.set_last(tokens)
    rounds.buffers.set_uniforms(uniforms, committed, K)
    assert rounds.drafter is not None
    rounds.drafter.propose(tokens, K, rounds.constraint)
    rounds.constraint.rollback(0)
    drafted = rows_of(rounds, 1, committed + K)
    np.testing.assert_array_equal(drafted[:, : committed - 1], exact[:, : committed - 1])
    assert (drafted[:, committed - 1 : committed + K - 1] != 0).any((0, 2)).all()
    left = drafted[:, committed - 1]
    outcome = rounds.run(tokens, K, uniforms)
    tokens += outcome.tokens
    clean.target.prefill(tokens[committed - 1 : -1])
    assert rounds.target.length == clean.target.length == len(tokens) - 1
    for layer in (0, 1):
        np.testing.assert_array_equal(
            rows_of(rounds, layer, len(tokens) - 1), rows_of(clean, layer, len(tokens) - 1)
        )
    assert not np.allclose(rows_of(rounds, 1, committed)[:, committed - 1], left, atol=0.01)


def test_a_skipped_layer_is_not_touched_by_drafts(bundle: Path) -> None:
    rounds = load(bundle)
    rounds.target.prefill(TOKENS[:-1])
    before = rows_of(rounds, 0, POSITIONS)
    rounds.buffers.set_last(TOKENS)
    assert rounds.drafter is not None
    rounds.drafter.propose(TOKENS, K, rounds.constraint)
    np.testing.assert_array_equal(rows_of(rounds, 0, POSITIONS), before)


# The search


def test_hits_are_what_rounds_would_draft(bundle: Path, plain: Path) -> None:
    """Read as blocks behind exact rows: the choices of real draft passes, token for token."""
    cache = Bundle.load(plain).manifest.target.cache
    graph = open_search(plain / "onnx", cache, VOCAB, K)
    page = graph.write(TOKENS, 30, ends=())
    rounds = load(bundle)
    rounds.begin(GREEDY, TOKENS)
    for block in (1, 3):
        hits = graph.hits(page, [0], block)
        assert len(hits) == len(page.tokens) - 1 - page.start
        for at in range(page.start + 1, len(page.tokens) - block, block):
            text = list(page.tokens[:at])
            rounds.target.length = 0
            rounds.target.prefill(text[:-1])
            rounds.buffers.set_last(text)
            assert rounds.drafter is not None
            rounds.drafter.propose(text, block, rounds.constraint)
            rounds.constraint.rollback(0)
            drafts = rounds.buffers.drafts(block)[0].tolist()
            first = at - page.start - 1
            for i, draft in enumerate(drafts):
                assert hits[first + i] == (draft == page.tokens[at + i])
                if draft != page.tokens[at + i]:
                    break
    assert graph.hits(page, [], 3) == [True] * len(hits), "the whole target predicts its own text"


def test_the_search_runs_on_a_written_target(plain: Path, tmp_path: Path) -> None:
    manifest = Bundle.load(plain).manifest
    onnx = Path(shutil.copytree(plain / "onnx", tmp_path / "onnx"))
    save(tail_model(VOCAB), "tail", WeightStore(directory=onnx))
    before = sorted(path.name for path in onnx.iterdir())
    start = perf_counter()
    found = choose_layers(
        onnx,
        plain,
        cache=manifest.target.cache,
        vocab_size=VOCAB,
        special=SpecialTokens(bos_token_id=None, eos_token_ids=()),
        most=K,
        seconds=1,
    )
    assert found.skipped in ({0}, {1})
    assert 0 <= found.acceptance <= 1
    assert 1 <= found.k <= K
    assert perf_counter() - start < 60
    assert sorted(path.name for path in onnx.iterdir()) == before


COSTS = StepCosts(verify_s={1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}, layer_s=0.1, tail_s=0.05)


def test_a_score_is_the_papers_speedup() -> None:
    """Three in four of independent drafts: (1 + Σ α^i) / what the round costs."""
    rng = np.random.default_rng(0)
    hits = [(rng.random(100_000) < 0.75).tolist()]
    found = score(frozenset([0, 1, 2, 3, 4]), hits, COSTS, 3)
    draft_s = 1.0 - 0.5 + 0.05
    expected = {
        k: sum(0.75**i for i in range(k + 1)) * 1.05 / (COSTS.verify_s[k + 1] + 0.05 + k * draft_s)
        for k in (1, 2, 3)
    }
    assert found.acceptance == pytest.approx(0.75, abs=0.01)  # seven standard errors
    assert found.k == max(expected, key=expected.__getitem__)
    assert found.speedup == pytest.approx(max(expected.values()), rel=0.01)


def test_misses_that_cluster_reach_further() -> None:
    """As many hits, in runs: more of them lie behind another."""
    alternating, clustered = [[True, False] * 50], [[True] * 50 + [False] * 50]
    one, other = (score(frozenset(range(8)), hits, COSTS, 3) for hits in (alternating, clustered))
    assert one.acceptance == other.acceptance == 0.5
    assert other.speedup > one.speedup


@pytest.mark.parametrize("wanted", [{3, 4, 8}, {0}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}])
def test_a_climb_finds_the_top_of_a_hill(wanted: set[int]) -> None:
    """Of 4,094 sets over 12 layers; every layer counts by itself."""
    search = LayerSearch(
        layers=12, evaluate=hill(wanted), ceiling=far, deadline=perf_counter() + 60
    )
    assert search.run().skipped == wanted
    assert len(search.seen) < 1000
    assert all(0 < len(tried) < 12 for tried in search.seen)


def test_a_search_without_time_tries_one_set() -> None:
    search = LayerSearch(layers=12, evaluate=hill({3}), ceiling=far, deadline=0.0)
    assert search.run().skipped in search.seen
    assert len(search.seen) == 1


def test_what_cannot_win_is_not_tried() -> None:
    """Of sets that are worth less at best than what was found, only lone layers are."""
    deadline = perf_counter() + 60
    search = LayerSearch(
        layers=12, evaluate=hill({1, 2, 3}), ceiling=lambda s: -len(s), deadline=deadline
    )
    best = search.run()
    tried = list(search.seen)
    for i, skipped in enumerate(tried[1:], start=1):
        so_far = max(search.seen[earlier].speedup for earlier in tried[:i])
        assert len(skipped) == 1 or -len(skipped) > so_far
    assert best.speedup == max(score.speedup for score in search.seen.values())
    assert len(tried) < 40


def test_a_ceiling_is_what_full_acceptance_brings() -> None:
    hits = [[True] * 50]
    for count in (1, 4, 8):
        skipped = frozenset(range(count))
        assert ceiling(skipped, COSTS, 3) == score(skipped, hits, COSTS, 3).speedup


def far(skipped: Layers) -> float:
    return 100.0


def hill(wanted: set[int]):  # type: ignore[no-untyped-def]
    def evaluate(skipped: Layers) -> Score:
        wrong = len(skipped ^ wanted)
        return Score(
            skipped=skipped, acceptance=1 - wrong / 12, draft_cost=0.5, k=1, speedup=2.0 - wrong
        )

    return evaluate


def test_a_build_refuses_what_does_not_pay(
    kept_traces: None, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 2 and nothing left; the message has the measured figures and what to try."""
    best = Score(skipped=frozenset([1]), acceptance=0.42, draft_cost=0.6, k=1, speedup=0.9)
    monkeypatch.setattr(layer_skip_draft, "choose_layers", lambda *_, **__: best)
    out = tmp_path / "bundle"
    result = CliRunner().invoke(
        app, ["build", "--target", str(tiny_target), "--draft", "layer-skip", "--out", str(out)]
    )
    assert result.exit_code == 2
    for told in ("without layers 1", "0.42", "0.60 of a plain", "0.90 ×", "--draft ngram"):
        assert told in result.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_a_build_keeps_what_pays_with_its_figures(
    kept_traces: None, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = Score(skipped=frozenset([1]), acceptance=0.9, draft_cost=0.6, k=3, speedup=1.2)
    monkeypatch.setattr(layer_skip_draft, "choose_layers", lambda *_, **__: best)
    manifest = Bundle.load(
        build(tiny_target, tmp_path / "bundle", "--draft", "layer-skip")
    ).manifest
    assert manifest.draft == LayerSkipDraft(skipped_layers=(1,))
    figures = {gate.name: gate.figures for gate in manifest.gates}["layer-skip"]
    assert figures == {"acceptance": 0.9, "draft_cost": 0.6, "speedup": 1.2, "k": 3}


# How layers are written


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0", (0,)), ("3-5,9", (3, 4, 5, 9)), ("9, 3-5,4", (3, 4, 5, 9)), ("7-7", (7,))],
)
def test_layers_as_people_write_them(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text, 10) == layers
    assert parse_layers(as_text(layers), 10) == layers
    assert [layer for a, b in runs(layers) for layer in range(a, b + 1)] == list(layers)


@pytest.mark.parametrize("text", ["", "10", "0-9", "5-3", "a", "1,,2", "-1", "1-", "1.5"])
def test_layers_that_are_none(text: str) -> None:
    with pytest.raises(BuildError, match=r"--skip-layers: received .* 0 to 9, and not all"):
        parse_layers(text, 10)


def test_an_empty_set_is_no_draft() -> None:
    for layers in ((), (2, 1), (1, 1), (-1,)):
        with pytest.raises(BundleError, match="ascending layers, at least one"):
            LayerSkipDraft(skipped_layers=layers)


def test_a_bundle_whose_layers_do_not_exist(bundle: Path, tmp_path: Path) -> None:
    manifest = Bundle.load(bundle).manifest
    wrong = dataclasses.replace(manifest, draft=LayerSkipDraft(skipped_layers=(0, 2)))
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    (copy / "manifest.json").write_text(wrong.to_json())
    with pytest.raises(BundleError, match=r"received 0,2\. Expected some of the target's 2 layers"):
        Bundle.load(copy)


@pytest.mark.slow
def test_a_target_trained_for_it_accepts_most_drafts(root: Path, tmp_path: Path) -> None:
    """With one layer of four; a target that wasn't trained so would lose nearly all of them.

    Its speed is for `python -m runtime bench` on an idle machine.
    """
    target, out = tmp_path / "target", tmp_path / "bundle"
    script = [sys.executable, str(root / "scripts" / "train_layer_dropout.py")]
    subprocess.run([*script, "--layers", "4", "--out", str(target)], check=True, timeout=1800)
    build(target, out, "--draft", "layer-skip", "--skip-layers", "1-3")
    latency = Bundle.load(out).latency
    assert latency is not None
    assert latency["acceptance"] > 0.6
