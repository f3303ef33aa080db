"""Penalties, bias, bans and minimum length inside the graphs: Hugging Face's law, row by row.

Hugging Face's processors and the OpenAI API's formula, over each row's own history, say what the
law of a row is. The draft step shows its law; accept doesn't, so it is probed: with uniforms on
either side of every edge of the cumulative sum the tokens that come out tell the whole law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers_sampling import (
    OUTPUTS,
    Feed,
    accept_session,
    chains,
    columns,
    row_of_logits,
    tail_session,
    trimmed,
)
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime.constraint import Constraint
from runtime.sampling import SamplingParams
from runtime.sampling_inputs import SamplingInputs

VOCAB = 300  # longer than the graph's list of 128
# The trimmed draft lacks 3, 30, 40, 120 and 299.
EOS = (6, 250)
PROMPT = (3, 5, 5, 8, 120, 258, 299)
OUTPUT = (5, 10, 10, 30, 258)
DRAFTS = (10, 31, 31, 8)  # an output token, a new one twice, one of the prompt
EDGE = 5e-6  # f32 sums of 300 terms near 1 are good to about 1e-6

BIAS = {5: -0.8, 31: 0.9, 40: 0.7, 200: -0.6, 299: 0.5}
ALL = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=BIAS,
    banned_tokens=(4, 77, 130),
    min_tokens=len(OUTPUT) + 2,
)
ASKED = {
    "repetition": SamplingParams(repetition_penalty=1.3),
    "repetition below 1": SamplingParams(repetition_penalty=0.7),
    "presence": SamplingParams(presence_penalty=0.9),
    "frequency": SamplingParams(frequency_penalty=-0.6),
    "bias": SamplingParams(logit_bias=BIAS),
    "bans": SamplingParams(banned_tokens=(4, 77, 130)),
    "min_tokens ahead": SamplingParams(min_tokens=len(OUTPUT) + len(DRAFTS) + 1),
    "min_tokens within the drafts": SamplingParams(min_tokens=len(OUTPUT) + 2),
    "min_tokens behind": SamplingParams(min_tokens=len(OUTPUT)),
    "all": ALL,
}
WARPED = {
    "temperature": {"temperature": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "top-k, top-p, min-p": {"temperature": 1.2, "top_k": 60, "top_p": 0.9, "min_p": 0.01},
    "a long top-p": {"temperature": 1.5, "top_p": 0.98},
}
# draft_vocab, mapped by d2t
DRAFTERS = {"the same": (VOCAB, False), "trimmed": (150, True), "padded": (310, False)}


class OpenAIPenalties:
    """mu[j] − c[j] · frequency − (c[j] > 0) · presence, c counting the answer so far."""

    def __init__(self, prompt_length: int, params: SamplingParams) -> None:
        self._prompt_length = prompt_length
        self._params = params

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros_like(scores)
        for token in input_ids[0, self._prompt_length :].tolist():
            counts[:, token] += 1
        shifted = scores - counts * self._params.frequency_penalty
        return shifted - (counts > 0).float() * self._params.presence_penalty


def processors(params: SamplingParams) -> LogitsProcessorList:
    """Everything that is asked, in the order of the design; processors, then warpers."""
    made: list[Callable[..., torch.Tensor]] = []
    if params.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    made.append(OpenAIPenalties(len(PROMPT), params))
    if params.logit_bias:
        biases = [[[token], bias] for token, bias in params.logit_bias.items()]
        made.append(SequenceBiasLogitsProcessor(biases))
    if params.banned_tokens:
        made.append(SuppressTokensLogitsProcessor(list(params.banned_tokens)))
    if params.min_tokens:
        made.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, list(EOS)))
    return LogitsProcessorList(made + warpers(params))


def warpers(params: SamplingParams) -> list[Callable[..., torch.Tensor]]:
    made: list[Callable[..., torch.Tensor]] = []
    if params.temperature:
        made.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        made.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        made.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        made.append(MinPLogitsWarper(params.min_p))
    return made


def hugging_face(
    params: SamplingParams,
    logits: np.ndarray,  # [vocab]
    output: tuple[int, ...],
) -> np.ndarray:  # [vocab] scores, −inf where a token is not kept
    ids = torch.tensor([[*PROMPT, *output]])
    scores = processors(params)(ids, torch.from_numpy(logits[None].copy()))
    return scores[0].numpy()


def law(scores: np.ndarray) -> np.ndarray:
    return torch.from_numpy(scores).double().softmax(-1).numpy()


def behind(
    params: SamplingParams, drafts: tuple[int, ...], output: tuple[int, ...] = OUTPUT
) -> Feed:
    """The adjusting inputs as the runtime fills them: committed output, a row for each draft."""
    inputs = SamplingInputs(VOCAB, len(drafts) + 1)
    inputs.begin(params, PROMPT)
    inputs.commit(output)
    constraint = Constraint(inputs.allowed)
    constraint.begin(
        eos_token_ids=EOS, banned_tokens=params.banned_tokens, min_tokens=params.min_tokens
    )
    for token in output:
        assert constraint.open_row(0)
        assert constraint.settle(0, token) == 1
    for i, token in enumerate(drafts):
        assert constraint.open_row(i)
        assert constraint.drafted(token)
    constraint.open_row(len(drafts))
    others = {n: v for n, v in inputs.shared.items() if n not in columns([params])}
    return others | {"allowed_tokens": inputs.allowed}


def some_logits(rows: int, seed: int = 2) -> np.ndarray:
    """Flat enough that every kept token's p is far above EDGE."""
    return np.random.default_rng(seed).normal(0.3, 0.6, (rows, VOCAB)).astype(np.float32)


def all_params() -> list[object]:
    return [
        pytest.param(replace(asked, **warped), id=f"{name}, {how}")
        for name, asked in ASKED.items()
        for how, warped in WARPED.items()
    ]


# The draft step.


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", all_params())
def test_a_draft_step_keeps_and_weighs_as_hugging_face(
    drafter: str, params: SamplingParams
) -> None:
    """With no draft in front of it, and with some: each is one step of a round."""
    ids = draft_ids(drafter)
    for n in range(len(DRAFTS) + 1):
        logits = some_logits(1, seed=n)[0]
        expected = law(hugging_face(params, known_to(ids, logits), (*OUTPUT, *DRAFTS[:n])))
        q = draft_law(drafter, logits, params, DRAFTS[:n])
        inside = ids < VOCAB
        np.testing.assert_array_equal(q[inside] > 0, expected[ids[inside]] > 0)
        np.testing.assert_allclose(q[inside], expected[ids[inside]], rtol=3e-5)
        assert (q[~inside] == 0).all()


@pytest.mark.parametrize("name", ASKED)
def test_a_greedy_draft_is_hugging_face_s_argmax(name: str) -> None:
    params, found = ASKED[name], set()
    for seed in range(20):
        logits = some_logits(1, seed)[0]
        scores = hugging_face(params, logits, (*OUTPUT, *DRAFTS))
        q = draft_law("the same", logits, params, DRAFTS)
        found.add(int(scores.argmax()))
        assert np.flatnonzero(q).tolist() == [scores.argmax()]
    assert len(found) > 3


def draft_ids(drafter: str) -> np.ndarray:
    size, mapped = DRAFTERS[drafter]
    return np.arange(size) + (trimmed(VOCAB, size) if mapped else 0)


def known_to(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The target's width; −inf where the draft has no such token."""
    known = np.isin(np.arange(VOCAB), ids)
    return np.where(known, logits, np.float32(-np.inf))


def draft_law(
    drafter: str, logits: np.ndarray, params: SamplingParams, drafts: tuple[int, ...]
) -> np.ndarray:
    """q [draft_vocab] behind OUTPUT and the drafts; a padded draft would draw its padding."""
    size, mapped = DRAFTERS[drafter]
    ids = draft_ids(drafter)
    body = np.append(logits, np.full(max(0, size - VOCAB), 9, np.float32))[ids]
    asked = behind(params, drafts)
    asked["allowed_tokens"] = asked["allowed_tokens"][:, -1:]
    feed = {
        "body": body[None, None].astype(np.float32),
        "draft_uniforms": np.array([0.5], np.float32),
        "drafted_tokens": np.array([drafts], np.int64).reshape(1, len(drafts)),
        **columns([params]),
        **asked,
    }
    graph = tail_session(size, VOCAB, mapped=mapped)
    return graph.run(["draft_step_probs"], feed)[0][0, 0]


# Accept: the law of every row, behind the drafts before it.


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One sequence's round, run for many uniforms at once."""

    params: SamplingParams
    logits: np.ndarray  # [k + 1, vocab]
    drafts: tuple[int, ...] = DRAFTS
    drafter: str = "the same"

    def row(self, i: int, uniforms: np.ndarray) -> np.ndarray:
        """Tokens drawn from row i's own p: the drafts before it stand, its q is no law."""
        q = self._one_hots()
        q[i:] = 0
        accepted, tokens = self._run(q, np.zeros((len(uniforms), len(self.drafts))), uniforms)
        assert (accepted == i).all()
        return tokens

    def accepts(self, i: int, uniform: float) -> bool:
        """Whether draft i, of q = 1, stands against a uniform: while it is below p."""
        against = np.zeros((1, len(self.drafts)))
        against[0, i] = uniform
        accepted, _ = self._run(self._one_hots(), against, np.zeros(1))
        assert accepted[0] in (i, len(self.drafts))
        return bool(accepted[0] > i)

    def _one_hots(self) -> np.ndarray:
        ids = draft_ids(self.drafter)
        q = np.zeros((len(self.drafts), len(ids)), np.float32)
        for i, draft in enumerate(self.drafts):
            q[i, ids == draft] = 1
        return q

    def _run(
        self, q: np.ndarray, against: np.ndarray, uniforms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        n, k = len(uniforms), len(self.drafts)
        known = tuple(draft for draft in self.drafts if draft < VOCAB)
        one = {
            "logits": self.logits[None],
            "draft_tokens": np.array(self.drafts, np.int64).reshape(1, k),
            "draft_probs": q[None],
            "past_lengths": np.array([11], np.int32),
            **chains(1, k + 1),
            **columns([self.params]),
            **behind(self.params, known),
        }
        one["allowed_tokens"] = _widened(one["allowed_tokens"], k + 1)
        feed = {name: np.repeat(value, n, 0) for name, value in one.items()}
        feed["accept_uniforms"] = against.astype(np.float32)
        feed["draw_uniforms"] = np.repeat(uniforms[:, None], k + 1, 1).astype(np.float32)
        size, mapped = DRAFTERS[self.drafter]
        graph = accept_session(VOCAB, size, mapped=mapped)
        accepted, tokens, lengths = graph.run(OUTPUTS, feed)
        assert (lengths == 12 + accepted).all()
        return accepted, tokens


def _widened(allowed: np.ndarray, rows: int) -> np.ndarray:
    """Rows behind a draft that no target token is are never read; they are as any other."""
    return np.concatenate([allowed] + [allowed[:, -1:]] * (rows - allowed.shape[1]), 1)


def check_law(tokens: Callable[[np.ndarray], np.ndarray], p: np.ndarray) -> None:
    """Draws at both ends of every token's share of the cumulative sum."""
    kept = np.flatnonzero(p)
    edges = np.concatenate([[0], np.cumsum(p[kept])])
    assert (p[kept] > 4 * EDGE).all()  # no token too light to be seen
    uniforms = np.concatenate([edges[:-1] + EDGE, edges[1:] - EDGE])
    np.testing.assert_array_equal(tokens(uniforms), np.concatenate([kept, kept]))


@pytest.mark.parametrize("params", all_params())
def test_every_row_of_accept_draws_from_hugging_face_s_law(params: SamplingParams) -> None:
    logits = some_logits(len(DRAFTS) + 1)
    logits[np.arange(len(DRAFTS)), DRAFTS] = 4.5  # kept by every warper, so that they can stand
    probe = Probe(params=params, logits=logits)
    for i, row in enumerate(logits):
        p = law(hugging_face(params, row, (*OUTPUT, *DRAFTS[:i])))
        check_law(lambda uniforms, i=i: probe.row(i, uniforms), p)
        if i < len(DRAFTS):
            assert probe.accepts(i, p[DRAFTS[i]] - EDGE)
            assert not probe.accepts(i, p[DRAFTS[i]] + EDGE)


@pytest.mark.parametrize("params", all_params())
def test_plain_decoding_draws_from_hugging_face_s_law(params: SamplingParams) -> None:
    logits = some_logits(1, seed=4)
    probe = Probe(params=params, logits=logits, drafts=())
    check_law(lambda uniforms: probe.row(0, uniforms), law(hugging_face(params, logits[0], OUTPUT)))


@pytest.mark.parametrize("name", ASKED)
def test_greedy_rows_are_hugging_face_s_argmax(name: str) -> None:
    """Each row's best token, drafted where it must be, ends or goes on as the argmax says."""
    params = ASKED[name]
    for seed in range(10):
        logits = some_logits(len(DRAFTS) + 1, seed)
        for i, draft in enumerate(DRAFTS):
            logits[i, draft] = 9.0  # the argmax, whatever is asked
        for i in range(len(DRAFTS) + 1):
            lowered = logits.copy()
            if i < len(DRAFTS):
                lowered[i, DRAFTS[i]] = -9.0
            best = hugging_face(params, lowered[i], (*OUTPUT, *DRAFTS[:i])).argmax()
            probe = Probe(params=params, logits=lowered)
            accepted, tokens = probe._run(
                probe._one_hots(), np.zeros((1, len(DRAFTS))), np.zeros(1)
            )
            assert (accepted[0], tokens[0]) == (i, best)


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "all"])
def test_a_history_frozen_over_the_round_would_be_seen(name: str) -> None:
    """The tests above can fail: the row behind the drafts has another law than the first."""
    params = replace(ASKED[name], temperature=1.0)
    row = some_logits(1)[0]
    frozen = law(hugging_face(params, row, OUTPUT))
    last = law(hugging_face(params, row, (*OUTPUT, *DRAFTS)))
    assert np.abs(last - frozen).max() > 20 * EDGE


@pytest.mark.parametrize("kind", ["normal", "ties", "banned", "steep", "huge"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_behind_drafts_is_that_row_alone_behind_committed_tokens(
    kind: str, temperature: float
) -> None:
    """Token for token, over 200 uniforms: the drafts' history and the committed one are one."""
    params = replace(ALL, temperature=temperature, top_p=0.95, min_tokens=0)
    rng = np.random.default_rng(8)
    logits = row_of_logits(rng, kind, (len(DRAFTS) + 1, VOCAB))
    most = np.abs(logits[np.isfinite(logits)]).max()
    logits[np.arange(len(DRAFTS)), DRAFTS] = most * 4 + 40
    uniforms = rng.random(200)
    for i in range(len(DRAFTS) + 1):
        together = Probe(params=params, logits=logits).row(i, uniforms)
        feed = {
            "logits": logits[None, i : i + 1],
            "draft_tokens": np.zeros((1, 0), np.int64),
            "draft_probs": np.zeros((1, 0, VOCAB), np.float32),
            "accept_uniforms": np.zeros((1, 0), np.float32),
            "past_lengths": np.zeros(1, np.int32),
            **chains(1, 1),
            **columns([params]),
            **behind(params, (), (*OUTPUT, *DRAFTS[:i])),
        }
        feed = {name: np.repeat(value, len(uniforms), 0) for name, value in feed.items()}
        feed["draw_uniforms"] = uniforms[:, None].astype(np.float32)
        alone = accept_session(VOCAB).run(["next_token"], feed)[0]
        np.testing.assert_array_equal(together, alone)


# Draft vocabularies that are not the target's.


def test_a_trimmed_draft_changes_nothing_of_p() -> None:
    ids = draft_ids("trimmed")
    drafts = tuple(int(t) for t in (ids[10], ids[40], ids[10]))
    logits = some_logits(4)
    logits[np.arange(3), drafts] = 3.0
    params = replace(ALL, temperature=0.9, banned_tokens=(ids[11], 300 - 2), min_tokens=0)
    probe = Probe(params=params, logits=logits, drafts=drafts, drafter="trimmed")
    for i, row in enumerate(logits):
        p = law(hugging_face(params, row, (*OUTPUT, *drafts[:i])))
        check_law(lambda uniforms, i=i: probe.row(i, uniforms), p)


def test_a_draft_beyond_the_target_is_rejected_where_it_stands() -> None:
    """Token 305 of a padded draft: the row it was drafted in is the last token's, adjusted."""
    logits = some_logits(4)
    logits[[0, 2], [31, 10]] = 4.5
    params = replace(ALL, temperature=0.9)
    probe = Probe(params=params, logits=logits, drafts=(31, 305, 10), drafter="padded")
    uniforms = np.linspace(0.001, 0.999, 300)
    q = probe._one_hots()
    accepted, tokens = probe._run(q, np.zeros((300, 3)), uniforms)
    assert (accepted == 1).all()
    p = law(hugging_face(params, logits[1], (*OUTPUT, 31)))
    expected = np.searchsorted(np.cumsum(p), uniforms, side="right")
    np.testing.assert_array_equal(tokens, expected)
