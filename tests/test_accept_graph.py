"""The accept graph on ONNX Runtime: the reference's decisions, and in law the target's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers_sampling import (
    BELOW_ONE,
    DRAFT_KINDS,
    LOGIT_KINDS,
    Feed,
    Round,
    Tally,
    accept_session,
    adjusting,
    adjusting_params,
    chains,
    columns,
    draft_logits,
    neutral,
    random_history,
    row_of_logits,
    sampling_params,
    tail_session,
    trimmed,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.accept_graph import accept_model
from runtime import reference
from runtime.contract import accept_graph, check_graph
from runtime.errors import VocabularyMismatch
from runtime.reference import History
from runtime.sampling import SamplingParams

# vocab, draft_vocab, mapped by d2t. 128 is the length of the graph's list.
VOCABULARIES = (
    (2, 2, False),
    (3, 2, True),
    (7, 7, False),
    (7, 9, False),  # a draft padded beyond the target
    (90, 64, False),  # a target padded beyond the draft
    (128, 128, False),
    (129, 129, False),
    (300, 100, True),
    (1000, 1000, False),
    (5000, 600, True),
)
LARGE = 16_384  # from here on the list is found through column maxima
EXAMPLES = 1000


def make_round(
    vocabulary: tuple[int, int, bool],
    k: int,
    rows: list[SamplingParams],
    kinds: list[tuple[str, str]],
    seed: int,
    *,
    strays: float = 0.0,
    histories: bool = False,
) -> Round:
    """A batch of rounds whose drafts were drawn from their q, but for a share of the rows."""
    vocab, draft_vocab, mapped = vocabulary
    rng = np.random.default_rng(seed)
    shift = trimmed(vocab, draft_vocab) if mapped else np.zeros(draft_vocab, np.int64)
    ids = np.arange(draft_vocab) + shift
    feed: dict[str, list[np.ndarray]] = {"logits": [], "draft_tokens": [], "draft_probs": []}
    befores: list[History | None] = []
    for params, (kind, draft_kind) in zip(rows, kinds, strict=True):
        logits = row_of_logits(rng, kind, (k + 1, vocab))
        mask = bool(rng.integers(2))
        before = random_history(rng, logits, mask=mask) if histories else None
        drafts = draft_logits(rng, draft_kind, logits[:k], ids)
        tokens, probs = _drafts(rng, drafts, params, ids, vocab, before)
        if rng.random() < strays:
            tokens = ids[rng.integers(0, draft_vocab, k)]
        feed["logits"].append(logits)
        feed["draft_tokens"].append(tokens)
        feed["draft_probs"].append(probs)
        befores.append(before)
    batch = {name: np.stack(values) for name, values in feed.items()}
    batch |= _uniforms(rng, len(rows), k) | columns(rows)
    batch |= adjusting(rows, befores, vocab, k + 1) | chains(len(rows), k + 1)
    return Round(
        vocab=vocab,
        draft_vocab=draft_vocab,
        mapped=mapped,
        rows=rows,
        feed=batch,
        histories=befores,
    )


def _drafts(
    rng: np.random.Generator,
    logits: np.ndarray,
    params: SamplingParams,
    ids: np.ndarray,
    vocab: int,
    before: History | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Target tokens [k] and q [k, draft_vocab]; NaN where a mask leaves the draft no token."""
    probs = np.full(logits.shape, np.nan, np.float32)
    tokens = np.full(len(logits), ids[0], np.int64)
    for i, row in enumerate(logits):
        if before is not None:
            output = (*before.output, *tokens[:i].tolist())
            allowed = None if before.allowed is None else before.allowed[i]
            now = replace(before, output=output, allowed=allowed)
            row = reference.adjusted(row, params, now, np.minimum(ids, vocab - 1))
        if np.isfinite(row).any():
            tokens[i], probs[i], _ = reference.draft_sample(row, rng.random(), params, ids)
    return tokens, probs


def _uniforms(rng: np.random.Generator, batch: int, k: int) -> Feed:
    draws = rng.random((batch, k + 1), np.float32)
    extreme = rng.random((batch, k + 1))
    draws[extreme < 0.02] = 0
    draws[extreme > 0.98] = BELOW_ONE
    return {
        "accept_uniforms": rng.random((batch, k), np.float32),
        "draw_uniforms": draws,
        "past_lengths": rng.integers(0, 1000, batch).astype(np.int32),
    }


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    batch = draw(st.integers(1, 4))
    histories = draw(st.booleans())
    asked = adjusting_params if histories else sampling_params
    kind = st.tuples(st.sampled_from(LOGIT_KINDS), st.sampled_from(DRAFT_KINDS))
    return make_round(
        draw(st.sampled_from(VOCABULARIES)),
        draw(st.integers(0, 8)),
        draw(st.lists(asked, min_size=batch, max_size=batch)),
        draw(st.lists(kind, min_size=batch, max_size=batch)),
        draw(st.integers(0, 2**32)),
        strays=0.125,
        histories=histories,
    )


def test_decides_as_the_reference() -> None:
    tally = Tally()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(rounds())
    def check(case: Round) -> None:
        accepted, tokens, lengths = case.run()
        assert (lengths == case.feed["past_lengths"] + accepted + 1).all()
        for row in range(len(case.rows)):
            expected = case.expected(row)
            decided = (int(accepted[row]), int(tokens[row]))
            if tally.count(expected.margin):
                assert decided == (expected.num_accepted, expected.next_token), expected

    check()
    print(f"accept: {tally.cases} cases, {tally.excluded} too near an edge")  # noqa: T201
    assert tally.cases >= 2000
    assert tally.excluded <= 0.01 * tally.cases


def plain_round(vocab: int, k: int, params: SamplingParams, *, seed: int = 0) -> Round:
    """One sequence, draft = target."""
    return make_round((vocab, vocab, False), k, [params], [("normal", "same")], seed)


def changed(case: Round, **arrays: np.ndarray) -> Round:
    return Round(
        vocab=case.vocab,
        draft_vocab=case.draft_vocab,
        mapped=case.mapped,
        rows=case.rows,
        feed=case.feed | arrays,
    )


@pytest.mark.parametrize(("vocab", "draft_vocab", "mapped"), VOCABULARIES)
def test_signature_is_the_contract(vocab: int, draft_vocab: int, mapped: bool) -> None:
    graph = accept_session(vocab, draft_vocab, mapped=mapped)
    names = {"float": "float32", "int64": "int64", "int32": "int32", "bool": "bool"}
    names = {f"tensor({onnx})": numpy for onnx, numpy in names.items()}
    inputs, outputs = (
        {t.name: (names[t.type], t.shape) for t in side}
        for side in (graph.get_inputs(), graph.get_outputs())
    )
    axes = check_graph(accept_graph(), inputs, outputs, "accept")
    assert axes == {"vocab": vocab, "draft_vocab": draft_vocab}


def test_large_vocabulary_decides_as_the_reference() -> None:
    rows = [
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=2.0, top_p=0.97, min_p=1e-4),
        SamplingParams(temperature=1.0, top_k=3000),
    ]
    kinds = [("steep", "close"), ("ties", "close"), ("normal", "close"), ("flat", "other")]
    tally = Tally()
    for seed in range(6):
        case = make_round((LARGE, 600, True), 3, rows, kinds, seed)
        accepted, tokens, _ = case.run()
        for row in range(4):
            expected = case.expected(row)
            if tally.count(expected.margin):
                decided = (int(accepted[row]), int(tokens[row]))
                assert decided == (expected.num_accepted, expected.next_token), (seed, row)
    assert tally.excluded <= 2


def test_uses_no_operator_that_tensorrt_refuses() -> None:
    model = accept_model(LARGE, trimmed(LARGE, 600))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    nodes = list(model.graph.all_nodes())
    refused = {"NonZero", "Compress", "Unique", "Multinomial", "Bernoulli", "RandomUniform"}
    assert not refused & {node.op_type for node in nodes}
    assert not any("reduction" in n.attributes for n in nodes if n.op_type.startswith("Scatter"))
    lists = [n.inputs[1].const_value.numpy() for n in nodes if n.op_type == "TopK"]
    assert lists
    assert max(lists) <= 3840


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_equal_to_target_accepts_everything(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=40, top_p=0.9)
    for seed in range(20):
        accepted, _, _ = plain_round(1000, 5, params, seed=seed).run()
        assert accepted.tolist() == [5]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_k_0_is_plain_sampling(temperature: float) -> None:
    case = plain_round(1000, 0, SamplingParams(temperature=temperature, top_p=0.9), seed=3)
    accepted, token, lengths = case.run()
    p = reference.transformed(case.feed["logits"][0, 0], case.rows[0])
    assert accepted.tolist() == [0]
    assert token.tolist() == [reference.draw(p, case.feed["draw_uniforms"][0, 0])]
    assert lengths.tolist() == [case.feed["past_lengths"][0] + 1]


@pytest.mark.parametrize("broken", [0.0, np.nan, 0.5])
def test_q_that_is_no_distribution_is_rejected_and_the_draw_is_from_p(broken: float) -> None:
    case = plain_round(1000, 3, SamplingParams(temperature=1.0))
    case = changed(case, draft_probs=np.full_like(case.feed["draft_probs"], broken))
    accepted, token, _ = case.run()
    p = reference.transformed(case.feed["logits"][0, 0], case.rows[0])
    assert accepted.tolist() == [0]
    assert token.tolist() == [reference.draw(p, case.feed["draw_uniforms"][0, 0])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_token_that_q_could_not_give_is_never_accepted(temperature: float) -> None:
    case = plain_round(300, 2, SamplingParams(temperature=temperature))
    probs = case.feed["draft_probs"].copy()
    probs[0, 0] = 0
    probs[0, 0, (case.feed["draft_tokens"][0, 0] + 1) % 300] = 1
    accepted, _, _ = changed(case, draft_probs=probs, accept_uniforms=np.zeros((1, 2), "f4")).run()
    assert accepted.tolist() == [0]


def test_p_of_zero_is_rejected_even_by_a_uniform_of_zero() -> None:
    case = plain_round(300, 1, SamplingParams(temperature=1.0, top_k=2))
    worst = int(case.feed["logits"][0, 0].argmin())
    probs = np.zeros((1, 1, 300), np.float32)
    probs[0, 0, worst] = 1
    arrays = {"draft_tokens": np.array([[worst]]), "accept_uniforms": np.zeros((1, 1), "f4")}
    accepted, token, _ = changed(case, draft_probs=probs, **arrays).run()
    assert accepted.tolist() == [0]
    assert token[0] in np.argsort(case.feed["logits"][0, 0])[-2:]


def test_greedy_tie_goes_to_the_lowest_id_beside_greedy_and_sampled_rows() -> None:
    logits = np.zeros((1, 1, 1000), np.float32)
    logits[0, 0, [200, 700]] = 9
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0)
    for rows in ([greedy], [greedy, sampled]):
        feed = {
            "logits": np.repeat(logits, len(rows), 0),
            "draft_tokens": np.zeros((len(rows), 0), np.int64),
            "draft_probs": np.zeros((len(rows), 0, 1000), np.float32),
            "accept_uniforms": np.zeros((len(rows), 0), np.float32),
            "draw_uniforms": np.full((len(rows), 1), 0.999, np.float32),
            "past_lengths": np.zeros(len(rows), np.int32),
            **columns(rows),
            **neutral(rows, 1000, 1),
            **chains(len(rows), 1),
        }
        assert accept_session(1000).run(["next_token"], feed)[0][0] == 200


def test_a_row_is_decided_the_same_alone_and_beside_any_neighbours() -> None:
    """Greedy, listed, searched and uncut rows each steer branches that all rows share."""
    rows = [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=3.0, top_p=0.99),
        SamplingParams(temperature=1.0),
    ]
    kinds = [("normal", "close")] * 4
    for seed in range(25):
        case = make_round((5000, 600, True), 4, rows, kinds, seed)
        together = case.run()
        for row in range(4):
            alone = {name: value[row : row + 1] for name, value in case.feed.items()}
            for all_rows, one in zip(together, changed(case, **alone).run(), strict=True):
                assert all_rows[row] == one[0]


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        ([0, 5], "maps to target token 6"),
        ([0, -2], "maps to target token -1"),
        ([0, -1], "2 draft tokens map to target token 0"),
    ],
)
def test_map_of_another_draft_is_refused(d2t: list[int], message: str) -> None:
    with pytest.raises(VocabularyMismatch, match=message):
        accept_model(4, np.array(d2t))


def test_map_of_another_length_is_refused() -> None:
    with pytest.raises(VocabularyMismatch, match=r"received shape \[2\]. Expected \[3\]"):
        accept_model(4, np.array([0, 0]), draft_vocab_size=3)


VOCAB, DRAFT_VOCAB, PAIRS_K = 6, 4, 2
PAIR_ROUNDS = 40_000
# One run, 35 degrees of freedom: chi-square exceeds this by chance once in 10⁶ runs
# (Wilson-Hilferty: 35 · (1 − 2/315 + 4.753 · √(2/315))³).
CHI_SQUARE_LIMIT = 87.0


@pytest.mark.parametrize("fault", ["none", "q before top-k"])
def test_two_tokens_out_of_the_real_graphs_follow_the_target(fault: str) -> None:
    """40,000 rounds of draft, draft, accept through ONNX Runtime against p(y1) · p(y2 | y1).

    The planted fault is bugs.md 1: the draft samples under top-k, accept is told the raw softmax.
    """
    rng = np.random.default_rng(5)
    params = SamplingParams(temperature=0.9, top_k=3)
    target = rng.normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)  # next-token logits by token
    draft = rng.normal(0, 1.0, (VOCAB, DRAFT_VOCAB)).astype(np.float32)
    counts = np.zeros((VOCAB, VOCAB))
    for _ in range(10):
        first, second = _two_tokens(rng, target, draft, params, fault)
        np.add.at(counts, (first, second), 1)
    p = np.array([reference.transformed(row, params) for row in target])
    expected = PAIR_ROUNDS * p[0][:, None] * p
    assert (counts[expected == 0] == 0).all()
    cells = expected > 0
    chi_square = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    assert (chi_square < CHI_SQUARE_LIMIT) == (fault == "none"), chi_square


def _two_tokens(
    rng: np.random.Generator,
    target: np.ndarray,
    draft: np.ndarray,
    params: SamplingParams,
    fault: str,
) -> tuple[np.ndarray, np.ndarray]:
    """The first two tokens of a tenth of the rounds, all after token 0."""
    n = PAIR_ROUNDS // 10
    last, tokens, probs = np.zeros(n, np.int64), [], []
    for _ in range(PAIRS_K):
        body = draft[last][:, None]
        feed = {"body": body, "draft_uniforms": rng.random(n, np.float32), **columns([params] * n)}
        feed |= neutral([params] * n, VOCAB, 1, 0)
        token, q = tail_session(DRAFT_VOCAB, VOCAB).run(None, feed)
        raw = np.exp(body / 0.9)
        last = token[:, 0]
        tokens.append(token)
        probs.append(q if fault == "none" else raw / raw.sum(-1, keepdims=True))
    drafted = np.concatenate(tokens, 1)
    feed = {
        "logits": target[np.concatenate([np.zeros((n, 1), np.int64), drafted], 1)],
        "draft_tokens": drafted,
        "draft_probs": np.concatenate(probs, 1),
        "accept_uniforms": rng.random((n, PAIRS_K), np.float32),
        "draw_uniforms": rng.random((n, PAIRS_K + 1), np.float32),
        "past_lengths": np.zeros(n, np.int32),
        **columns([params] * n),
        **neutral([params] * n, VOCAB, PAIRS_K + 1),
        **chains(n, PAIRS_K + 1),
    }
    graph = accept_session(VOCAB, DRAFT_VOCAB, mapped=True)
    accepted, token = graph.run(["num_accepted", "next_token"], feed)
    first = np.where(accepted > 0, drafted[:, 0], token)
    second = np.where(accepted > 1, drafted[:, 1], token)
    return first, np.where(accepted > 0, second, _next(rng, target, first, params))


def _next(
    rng: np.random.Generator, target: np.ndarray, last: np.ndarray, params: SamplingParams
) -> np.ndarray:
    """The target's own next token, for rounds that committed one only."""
    p = np.array([reference.transformed(row, params) for row in target])
    return (np.cumsum(p, 1)[last] <= rng.random(len(last))[:, None]).sum(1)
