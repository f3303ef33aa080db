"""Trees on built bundles, whoever drafts: the target's own text, caches as a clean run leaves them.

Five drafters of a tiny f32 target: itself, a distilled model, lookup, an EAGLE-3 head, Medusa.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from helpers_build import K, places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tree import trees
from tiny_checkpoints import VOCAB, llama_config, save
from tiny_heads import (
    HIDDEN,
    eagle3_state,
    maps,
    medusa_config,
    medusa_state,
    published_config,
    write_head,
)
from typer.testing import CliRunner

from export.branch_tail import rank_model
from export.build import BuildRequest, build
from export.certificates import frequency, greedy
from export.certificates.target_rows import TargetRows
from export.cli import app
from runtime import (
    Decoder,
    FinishReason,
    Grammar,
    InvalidRequest,
    LimitExceeded,
    SamplingParams,
    buffers,
)
from runtime.bundle import Bundle
from runtime.engine import load_rounds
from runtime.errors import BuildError
from runtime.executor import EngineOptions
from runtime.round import Rounds
from runtime.tree import Tree
from runtime.tree_shape import DynamicTree, StaticTree, parse_tree
from runtime.uniforms import uniform_table

NODES, CONTEXT = 24, 96
PROMPT = "the hand and the quick hand and the quick"
SHAPES = ("1x1x1", "3x2x1", "2x2x2", "dynamic:16:4:4", "dynamic:5:2:3", "[[0],[1],[0,0],[1,0]]")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("distilled", "medusa")]
DRAFTERS = ["itself", "ngram", "eagle", *SLOW]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=7)


@pytest.fixture(scope="module", params=DRAFTERS)
def bundle(
    request: pytest.FixtureRequest,
    kept_traces: None,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: Path,
    tiny_draft: Path,
) -> Path:
    place = tmp_path_factory.mktemp("trees")
    if request.param in ("eagle", "medusa"):
        tiny_target = place / "target"
        save(tiny_target, llama_config(hidden_size=HIDDEN, num_hidden_layers=7))
    draft = drafter(request.param, place, tiny_target, tiny_draft)
    return built(place / "bundle", draft, tiny_target)


def drafter(kind: str, place: Path, target: Path, draft: Path) -> str:
    if kind == "eagle":
        state = eagle3_state() | maps()
        return str(write_head(place / "eagle", published_config(), state))
    if kind == "medusa":
        file = "medusa_lm_head.safetensors"
        return str(write_head(place / "medusa", medusa_config(), medusa_state(), file))
    return {"itself": str(target), "distilled": str(draft), "ngram": "ngram"}[kind]


def built(out: Path, draft: str, target: Path, nodes: int = NODES) -> Path:
    return build(
        BuildRequest(
            target=str(target),
            draft=draft,
            out=out,
            precision="fp32",
            max_context=CONTEXT,
            max_draft_tokens=K,
            max_tree_nodes=nodes,
        )
    )


@pytest.fixture(scope="module")
def decoder(bundle: Path) -> Iterator[Decoder]:
    with Decoder.load(bundle, threads=1) as decoder:
        yield decoder


def most_levels(decoder: Decoder) -> int:
    return min(K, decoder.rounds.buffers.max_draft_tokens)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_plain_greedy(decoder: Decoder, shape: str) -> None:
    tree = parse_tree(shape)
    if tree.depth > most_levels(decoder):
        tree = DynamicTree(nodes=tree.nodes, depth=most_levels(decoder))
    plain = decoder.generate(PROMPT, GREEDY, num_draft_tokens=0)
    found = decoder.generate(PROMPT, GREEDY, tree=tree)
    assert found.token_ids == plain.token_ids
    assert found.stats.num_spec_steps > 0


@pytest.mark.parametrize(
    "params",
    [
        replace(SAMPLED, temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5),
        replace(SAMPLED, temperature=0.0, banned_tokens=tuple(range(100, 120)), min_tokens=9),
        replace(SAMPLED, temperature=0.0, grammar=Grammar.regex("[a-h ]{3,30}")),
    ],
    ids=["penalties", "bans", "grammar"],
)
@pytest.mark.parametrize("shape", ["3x2x1", "dynamic:16:3:4"])
def test_greedy_is_plain_greedy_under_every_transform(
    decoder: Decoder, params: SamplingParams, shape: str
) -> None:
    plain = decoder.generate(PROMPT, params, num_draft_tokens=0)
    found = decoder.generate(PROMPT, params, tree=parse_tree(shape))
    assert found.token_ids == plain.token_ids
    assert found.finish_reason == plain.finish_reason


def test_a_replay_and_other_requests_between_change_nothing(decoder: Decoder) -> None:
    shape = parse_tree("3x2x1")
    first = decoder.generate(PROMPT, SAMPLED, tree=shape)
    decoder.generate("another text", GREEDY, tree=parse_tree("dynamic:9:3"))
    stream = decoder.stream(PROMPT, SAMPLED, tree=shape)
    next(stream)
    next(stream)
    stream.close()
    decoder.generate("a third", SAMPLED, num_draft_tokens=2)
    assert decoder.generate(PROMPT, SAMPLED, tree=shape).token_ids == first.token_ids


def test_the_context_ends_a_tree_as_it_ends_plain_decoding(decoder: Decoder) -> None:
    params = replace(GREEDY, max_tokens=None)
    plain = decoder.generate(PROMPT, params, num_draft_tokens=0)
    found = decoder.generate(PROMPT, params, tree=parse_tree("3x2x1"))
    assert plain.finish_reason is FinishReason.CONTEXT
    assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)


def rounds_of(bundle: Path) -> Rounds:
    return load_rounds(bundle, Bundle.load(bundle).manifest, EngineOptions(threads=1))


@pytest.mark.parametrize("shape", ["3x2x1", "dynamic:12:3:4"])
def test_after_a_tree_the_caches_are_a_clean_runs(bundle: Path, shape: str) -> None:
    """Rows of the target, its states, and what the next row says, round after round."""
    rounds, clean = rounds_of(bundle), rounds_of(bundle)
    prompt = [5 + i % 9 for i in range(20)]
    uniforms = uniform_table(1, CONTEXT, 8)
    tree = parse_tree(shape)
    for one in (rounds, clean):
        one.begin(SAMPLED, prompt)
    tokens = [*prompt, *rounds.prefill(prompt, uniforms).tokens]
    for _ in range(6):
        tokens += rounds.run_tree(tokens, tree, tree.nodes, uniforms).tokens
        rounds.buffers.sampling.commit([])
        length = rounds.target.length
        assert length == len(tokens) - 1
        clean.forget()
        clean.prefill(tokens, uniforms)
        ours, theirs = (one.target._rows[..., :length, :] for one in (rounds, clean))
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
        if rounds.target.features is not None and clean.target.features is not None:
            states = (one.target.features._rows[:length] for one in (rounds, clean))
            np.testing.assert_allclose(*states, atol=2e-5)
    if rounds.drafter is not None:
        assert rounds.drafter.length <= len(tokens) - 1


@given(data=st.data())
@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_trees_leave_the_caches_of_a_clean_run(
    pair: tuple[Rounds, Rounds], data: st.DataObject
) -> None:
    """After each round, and after taking some of its tokens back."""
    rounds, clean = pair
    prompt = data.draw(st.lists(st.integers(5, 40), min_size=2, max_size=20))
    uniforms = uniform_table(data.draw(st.integers(0, 99)), CONTEXT, 8)
    for one in pair:
        one.forget()
        one.begin(SAMPLED, prompt)
    tokens = [*prompt, *rounds.prefill(prompt, uniforms).tokens]
    for _ in range(3):
        shape = StaticTree(tree=data.draw(trees(most=6)))
        start = len(tokens)
        tokens += rounds.run_tree(tokens, shape, NODES, uniforms).tokens
        del tokens[start + data.draw(st.integers(1, len(tokens) - start)) :]
        rounds.rollback(len(tokens))
        length = rounds.target.length
        assert length == len(tokens) - 1
        clean.forget()
        clean.prefill(tokens, uniforms)
        ours, theirs = (one.target._rows[..., :length, :] for one in pair)
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.fixture(scope="module")
def pair(bundle: Path) -> tuple[Rounds, Rounds]:
    return rounds_of(bundle), rounds_of(bundle)


def test_a_tree_after_chains_and_chains_after_a_tree(decoder: Decoder) -> None:
    """Their drafts and caches don't stand in each other's way."""
    rounds, tokens = decoder.rounds, [5 + i % 9 for i in range(20)]
    uniforms, tree = uniform_table(1, CONTEXT, 8), parse_tree("2x2")
    expected = list(decoder.generate(tokens, GREEDY, num_draft_tokens=0).token_ids)
    rounds.begin(GREEDY, tokens)
    start = len(tokens)
    tokens += rounds.prefill(tokens, uniforms).tokens
    while len(tokens) < start + 30:
        tokens += rounds.run_tree(tokens, tree, 6, uniforms).tokens
        tokens += rounds.run(tokens, 2, uniforms).tokens
        tokens += rounds.run(tokens, 0, uniforms).tokens
    assert tokens[start : start + 30] == expected[:30]
    rounds.forget()


def test_sampled_as_often_as_the_target_alone(bundle: Path) -> None:
    """600 answers of three tokens by chains and trees; odds of a false alarm 1e-6 a sampling."""
    rows = TargetRows(rounds_of(bundle), CONTEXT)
    prompt = [5 + i % 9 for i in range(12)]
    with Decoder.load(bundle, threads=1) as decoder:
        found = frequency.certify(decoder, rows, prompt, 600)
    assert found.status == "passed", found


def test_a_sibling_tested_with_its_brothers_number_shows(
    bundle: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two drafts behind a row decided by one uniform: the second is accepted too seldom."""
    if "itself" not in request.node.name:
        pytest.skip("siblings of a poor draft have hardly any mass")
    monkeypatch.setattr(buffers, "accept_purpose", lambda rank: 1)
    rows, prompt = TargetRows(rounds_of(bundle), CONTEXT), [5 + i % 9 for i in range(12)]
    params = frequency.SAMPLINGS["top_k"]
    counts: Counter[tuple[int, ...]] = Counter()
    with Decoder.load(bundle, threads=1) as decoder:
        for seed in range(900):
            asked = replace(params, seed=seed, max_tokens=3, ignore_eos=True)
            tree = StaticTree(tree=Tree.of_widths([8, 2]))
            counts[decoder.generate(prompt, asked, tree=tree).token_ids] += 1
    assert not frequency.fit(counts, frequency.law(rows, prompt, params)).fits


def test_nothing_is_written_twice(bundle: Path) -> None:
    branch = bundle / "onnx" / "branch.onnx"
    if not branch.exists():
        pytest.skip("this drafter needs no branch graph")
    drafted = places(bundle / "onnx" / "draft.onnx")
    found = {name: place for name, place in places(branch).items() if name in drafted}
    assert found
    assert found == {name: drafted[name] for name in found}


def test_too_large_or_too_deep_a_tree_is_refused(decoder: Decoder) -> None:
    with pytest.raises(LimitExceeded, match="--max-tree-nodes"):
        decoder.generate(PROMPT, GREEDY, tree=parse_tree("5x5"))
    with pytest.raises(LimitExceeded, match="levels of a tree"):
        decoder.generate(PROMPT, GREEDY, tree=parse_tree("1x1x1x1x1"))
    with pytest.raises(InvalidRequest, match="Expected one of them"):
        decoder.generate(PROMPT, GREEDY, num_draft_tokens=2, tree=parse_tree("2"))
    assert decoder.generate(PROMPT, replace(GREEDY, max_tokens=2)).token_ids


def test_a_bundle_of_chains_refuses_trees(own_draft_bundle: Path) -> None:
    with (
        Decoder.load(own_draft_bundle, threads=1) as decoder,
        pytest.raises(LimitExceeded, match="--max-tree-nodes"),
    ):
        decoder.generate(PROMPT, GREEDY, tree=parse_tree("2"))


@pytest.mark.parametrize(("draft", "nodes"), [("ngram", 65), ("ngram", -1), (None, 8)])
def test_a_build_refuses_what_no_tree_is(
    tmp_path: Path, tiny_target: Path, draft: str | None, nodes: int
) -> None:
    with pytest.raises(BuildError, match="--max-tree-nodes: received"):
        build(
            BuildRequest(
                target=str(tiny_target), draft=draft, out=tmp_path / "b", max_tree_nodes=nodes
            )
        )
    assert not (tmp_path / "b").exists()


def test_a_draft_of_fewer_tokens_than_are_ranked_is_refused() -> None:
    with pytest.raises(BuildError, match="received a draft of 7 tokens"):
        rank_model(7, None, VOCAB)


def test_ids_that_the_target_lacks_are_never_ranked() -> None:
    """Nor where their logits are the highest, nor where the rest has no probability at all."""
    size, known = 40, 30
    model = rank_model(size, None, known)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    logits = np.full((1, 2, size), -1e9, np.float32)
    logits[..., known:] = 50
    logits[0, 0, 7] = logits[0, 1, 3] = 10
    logits[0, 1, 21] = 9
    tokens, probs = session.run(["top_tokens", "top_probs"], {"logits": logits})
    assert tokens.max() < known
    assert all(len(set(row)) == len(row) for row in tokens[0].tolist())
    assert tokens[0, 0, 0] == 7
    assert tokens[0, 1, :2].tolist() == [3, 21]
    assert probs[0, :, 0] == pytest.approx([1, 1 / (1 + np.exp(-1))])


def test_a_row_among_siblings_moves_by_rounding_alone(bundle: Path) -> None:
    """What `check` takes for the noise of a tree: in f32 next to nothing."""
    rounds = rounds_of(bundle)
    noise = greedy.tree_noise(TargetRows(rounds, CONTEXT), [[5 + i % 9 for i in range(12)]])
    assert 0 <= noise < 1e-4


def test_check_proves_trees_where_a_bundle_makes_them(
    bundle: Path, request: pytest.FixtureRequest
) -> None:
    if "ngram" not in request.node.name:
        pytest.skip("the certificates ask the same of every drafter; one is enough")
    shown = CliRunner().invoke(
        app, ["check", str(bundle), "--prompts", "5", "--samples", "60"], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == 0, shown.output
    assert "tree law" in shown.output
    certificates = json.loads((bundle / "reports" / "certificates.json").read_text())
    status = {one["name"]: one["status"] for one in certificates["certificates"]}
    assert status == dict.fromkeys(("contract", "law", "tree law", "greedy", "frequency"), "passed")
    inspected = CliRunner().invoke(app, ["inspect", str(bundle), "--json"])
    assert json.loads(inspected.output)["limits"]["max_tree_nodes"] == NODES
