"""The draft step's sampling tail: the reference's token and q, and Hugging Face's kept sets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from helpers_sampling import (
    BELOW_ONE,
    LOGIT_KINDS,
    Feed,
    Tally,
    adjusting,
    adjusting_params,
    columns,
    neutral,
    random_history,
    row_of_logits,
    sampling_params,
    tail_session,
    trimmed,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from export.draft_tail import append_draft_sampling
from export.draft_vocabulary import QOver
from runtime import reference
from runtime.contract import DRAFT_SAMPLING, DRAFT_STEP_PROBS, DRAFT_TOKEN
from runtime.errors import BuildError, VocabularyMismatch
from runtime.reference import History
from runtime.sampling import SamplingParams

# draft_vocab, the target's, mapped by d2t. 128 is the length of the graph's list.
VOCABULARIES = (
    (2, 2, False),
    (9, 20, True),
    (40, 33, False),  # a draft padded beyond the target
    (33, 40, False),  # a target padded beyond the draft
    (128, 128, False),
    (129, 129, True),
    (1000, 5000, True),
)


def run(
    logits: np.ndarray,  # [batch, draft_vocab]
    uniforms: np.ndarray,  # [batch]
    rows: list[SamplingParams],
    vocab: int | None = None,
    *,
    mapped: bool = True,
    adjustments: Feed | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """draft_token [batch], draft_step_probs [batch, draft_vocab]."""
    feed = {"body": logits[:, None], "draft_uniforms": uniforms, **columns(rows)}
    feed |= adjustments or neutral(rows, vocab or logits.shape[1], 1, 0)
    names = [DRAFT_TOKEN.name, DRAFT_STEP_PROBS.name]
    token, probs = tail_session(logits.shape[1], vocab, mapped=mapped).run(names, feed)
    assert token.shape == (len(rows), 1)
    assert probs.shape == (len(rows), 1, logits.shape[1])
    return token[:, 0], probs[:, 0]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A batch of draft steps, each behind drafts of its own."""

    vocabulary: tuple[int, int, bool]
    rows: list[SamplingParams]
    logits: np.ndarray  # [batch, draft_vocab]
    uniforms: np.ndarray  # [batch]
    drafted: np.ndarray  # [batch, n], target ids
    befores: list[History | None]

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        _, vocab, mapped = self.vocabulary
        asked = adjusting(self.rows, self.befores, vocab, 1) | {"drafted_tokens": self.drafted}
        return run(self.logits, self.uniforms, self.rows, vocab, mapped=mapped, adjustments=asked)

    def expected(self, row: int) -> tuple[int, np.ndarray, float]:
        ids, before, logits = target_ids(self.vocabulary), self.befores[row], self.logits[row]
        if before is not None:
            allowed = None if before.allowed is None else before.allowed[0]
            output = (*before.output, *self.drafted[row].tolist())
            now = replace(before, output=output, allowed=allowed)
            known = np.minimum(ids, self.vocabulary[1] - 1)
            logits = reference.adjusted(logits, self.rows[row], now, known)
        logits = np.where(ids < self.vocabulary[1], logits, np.float32(-np.inf))  # padding
        return reference.draft_sample(logits, self.uniforms[row], self.rows[row], ids)


def target_ids(vocabulary: tuple[int, int, bool]) -> np.ndarray:  # [draft_vocab]
    size, vocab, mapped = vocabulary
    return np.arange(size) + (trimmed(vocab, size) if mapped else 0)


@st.composite
def steps(draw: st.DrawFn) -> Steps:
    """Half of them adjust nothing; few ids are drafted, so that some are drafted twice."""
    vocabulary, histories = draw(st.sampled_from(VOCABULARIES)), draw(st.booleans())
    asked = adjusting_params if histories else sampling_params
    cases = draw(st.lists(st.tuples(asked, st.sampled_from(LOGIT_KINDS)), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size, vocab, _ = vocabulary
    known = target_ids(vocabulary)
    known = known[known < vocab]
    logits = np.stack([row_of_logits(rng, kind, (size,)) for _, kind in cases])
    befores = [
        _before(rng, row[: len(known)], known, vocab) if histories else None for row in logits
    ]
    few = rng.choice(known, 3)
    return Steps(
        vocabulary=vocabulary,
        rows=[params for params, _ in cases],
        logits=logits,
        uniforms=rng.random(len(cases), np.float32),
        drafted=rng.choice(few, (len(cases), draw(st.integers(0, 4)))),
        befores=befores,
    )


def _before(rng: np.random.Generator, logits: np.ndarray, known: np.ndarray, vocab: int) -> History:
    """Over the target's ids; a mask leaves the draft its likeliest token."""
    wide = np.full((1, vocab), -np.inf)
    wide[0, known] = logits
    return random_history(rng, wide, mask=bool(rng.integers(2)))


def test_draws_as_the_reference() -> None:
    tally = Tally()

    @settings(
        max_examples=400,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(steps())
    def check(case: Steps) -> None:
        tokens, probs = case.run()
        for i in range(len(case.rows)):
            token, q, margin = case.expected(i)
            if tally.count(margin):
                assert tokens[i] == token
                np.testing.assert_allclose(probs[i], q, rtol=5e-5, atol=1e-12)

    check()
    print(f"draft: {tally.cases} cases, {tally.excluded} too near an edge")  # noqa: T201
    assert tally.cases >= 600
    assert tally.excluded <= 0.01 * tally.cases


@pytest.mark.parametrize("beside", [[], [SamplingParams(temperature=1.0)]])
def test_greedy_q_is_one_hot_at_the_lowest_of_tied_ids(beside: list[SamplingParams]) -> None:
    rows = [SamplingParams(), *beside]
    logits = np.zeros((len(rows), 1000), np.float32)
    logits[:, [300, 800]] = 5
    tokens, probs = run(logits, np.full(len(rows), BELOW_ONE), rows)
    assert tokens[0] == 300
    np.testing.assert_array_equal(probs[0], reference.one_hot(300, 1000))


@pytest.mark.parametrize("uniform", [0.0, BELOW_ONE])
def test_token_of_zero_mass_is_never_drawn(uniform: float) -> None:
    """The ends of the cumulative sum lie on banned tokens."""
    logits = np.full((1, 1000), -np.inf, np.float32)
    logits[0, 300:700] = np.random.default_rng(0).normal(0, 2, 400)
    params = [SamplingParams(temperature=1.0, top_p=0.9)]
    tokens, probs = run(logits, np.array([uniform], np.float32), params)
    kept = np.flatnonzero(probs[0])
    assert tokens[0] == (kept[0] if uniform == 0 else kept[-1])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(temperature=1.0, top_k=300),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=2.0, top_p=0.99),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=1.5, min_p=1e-4),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.8),
        SamplingParams(temperature=1.5, top_k=400, top_p=0.95, min_p=0.001),
    ],
    ids=str,
)
def test_keeps_what_hugging_face_keeps(params: SamplingParams) -> None:
    logits = np.random.default_rng(1).normal(0, 2.5, (8, 1000)).astype(np.float32)
    expected = _hugging_face(params)(None, torch.from_numpy(logits)).softmax(-1).numpy()
    _, probs = run(logits, np.full(8, 0.5, np.float32), [params] * 8)
    np.testing.assert_array_equal(probs > 0, expected > 0)
    np.testing.assert_allclose(probs, expected, rtol=2e-5)
    for row, p in zip(logits, expected, strict=True):
        np.testing.assert_array_equal(reference.transformed(row, params) > 0, p > 0)


def test_ties_at_the_edge_are_kept_where_hugging_face_keeps_some() -> None:
    """Tokens 1 and 2 tie at top-p's edge. The warper keeps one of them, the graph both."""
    logits = np.log(np.array([[0.5, 0.2, 0.2, 0.1]], np.float32))
    params = SamplingParams(temperature=1.0, top_p=0.6)
    warped = _hugging_face(params)(None, torch.from_numpy(logits))
    assert int(torch.isfinite(warped).sum()) == 2
    _, probs = run(logits, np.zeros(1, np.float32), [params])
    np.testing.assert_array_equal(probs[0] > 0, [True, True, True, False])


def _hugging_face(params: SamplingParams) -> LogitsProcessorList:
    """The warpers in the order in which `generate` applies them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


@pytest.mark.parametrize(("draft_vocab", "vocab", "mapped"), VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_q_over_the_target_is_the_same_q(
    draft_vocab: int, vocab: int, mapped: bool, temperature: float
) -> None:
    """The same token, its probability where the target has it, nothing elsewhere."""
    rng = np.random.default_rng(draft_vocab)
    rows = [SamplingParams(temperature=temperature)] * 3
    feed = columns(rows) | neutral(rows, vocab, 1, drafted=0)
    feed["body"] = rng.standard_normal((3, 1, draft_vocab)).astype(np.float32)
    feed["draft_uniforms"] = rng.random(3).astype(np.float32)
    token, q = tail_session(draft_vocab, vocab, mapped=mapped).run(None, feed)
    session = tail_session(draft_vocab, vocab, mapped=mapped, q_over=QOver.TARGET)
    over_token, over_target = session.run(None, feed)
    ids = np.arange(draft_vocab) + (trimmed(vocab, draft_vocab) if mapped else 0)
    expected = np.zeros((3, 1, max(vocab, draft_vocab)), np.float32)
    expected[..., ids] = q
    np.testing.assert_array_equal(over_token, token)
    np.testing.assert_array_equal(over_target, expected[..., :vocab], strict=True)


def test_other_inputs_and_outputs_of_the_body_stay() -> None:
    model = _body(8, extra="present.0.key")
    append_draft_sampling(model)
    added = [spec.name for spec in DRAFT_SAMPLING]
    assert [v.name for v in model.graph.inputs] == ["body", *added]
    outputs = [DRAFT_TOKEN.name, DRAFT_STEP_PROBS.name, "present.0.key"]
    assert [v.name for v in model.graph.outputs] == outputs


def test_body_without_logits_is_refused() -> None:
    with pytest.raises(BuildError, match="Expected 'logits' among them"):
        append_draft_sampling(_body(8, name="hidden_states"))


def test_map_of_another_draft_is_refused() -> None:
    with pytest.raises(VocabularyMismatch, match=r"Expected \[8\]"):
        append_draft_sampling(_body(8), np.zeros(7, np.int64))


def _body(size: int, *, name: str = "logits", extra: str | None = None) -> ir.Model:
    given = ir.val("body", dtype=ir.DataType.FLOAT, shape=["batch", 1, size])
    nodes = [ir.node("Identity", [given]) for _ in range(2)]
    outputs = [node.outputs[0] for node in nodes][: 2 if extra else 1]
    for output, label in zip(outputs, (name, extra), strict=False):
        output.name, output.dtype, output.shape = label, given.dtype, given.shape
    graph = ir.Graph([given], outputs, nodes=nodes, opset_imports={"": 24}, name="draft")
    return ir.Model(graph, ir_version=10)
