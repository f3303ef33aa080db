"""Sessions, random rounds and laws shared by the sampling tests."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from hypothesis import strategies as st

from export.accept_graph import accept_model
from export.certificates.round_graphs import chain
from export.draft_tail import append_draft_sampling
from export.draft_vocabulary import QOver
from runtime import reference
from runtime.reference import History
from runtime.sampling import SamplingParams
from runtime.sampling_inputs import SamplingInputs

Feed = dict[str, np.ndarray]
OUTPUTS = ["num_accepted", "next_token", "new_lengths"]
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))

sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.0, 1.7, 10.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 50, 128, 200, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.83, 0.37, 0.013]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.07, 0.31, 1.0]),
)

adjusting_params = st.builds(
    replace,
    sampling_params,
    repetition_penalty=st.sampled_from([1.0, 1.1, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, 1), st.sampled_from([-100.0, -1.0, 3.5]), max_size=2),
)


def random_history(rng: np.random.Generator, logits: np.ndarray, *, mask: bool) -> History:
    """Tokens before the round, and a mask of every row that leaves its likeliest token."""
    rows, vocab = logits.shape
    prompt, output = (rng.integers(0, vocab, rng.integers(1, 9)).tolist() for _ in range(2))
    allowed = rng.random((rows, vocab)) < rng.choice([0.1, 0.5, 0.95])
    allowed[np.arange(rows), logits.argmax(-1)] = True
    return History(
        prompt=tuple(prompt), output=tuple(output[1:]), allowed=allowed if mask else None
    )


def adjusting(
    rows: list[SamplingParams], histories: list[History | None], vocab: int, width: int
) -> Feed:
    """The contract's adjusting inputs as the runtime fills them."""
    feeds = []
    for params, history in zip(rows, histories, strict=True):
        inputs = SamplingInputs(vocab, width)
        if history is not None:
            inputs.begin(params, history.prompt)
            inputs.commit(history.output)
            if history.allowed is not None:
                inputs.shared["adjust"][0] = True
                inputs.allowed[0] = history.allowed
        others = {n: v for n, v in inputs.shared.items() if n not in columns(rows)}
        feeds.append(others | {"allowed_tokens": inputs.allowed})
    return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}


def trimmed(vocab: int, draft_vocab: int, seed: int = 0) -> np.ndarray:
    """A d2t map [draft_vocab] that keeps a random part of the vocabulary, in order."""
    ids = np.random.default_rng(seed).permutation(vocab)[:draft_vocab]
    return np.sort(ids) - np.arange(draft_vocab)


def session(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@functools.cache
def accept_session(
    vocab: int, draft_vocab: int | None = None, *, mapped: bool = False
) -> ort.InferenceSession:
    size = draft_vocab or vocab
    d2t = trimmed(vocab, size) if mapped else None
    return session(accept_model(vocab, d2t, draft_vocab_size=size))


@functools.cache
def tail_session(
    draft_vocab: int,
    vocab: int | None = None,
    *,
    mapped: bool = True,
    q_over: QOver = QOver.DRAFT,
) -> ort.InferenceSession:
    """A draft step whose body is its input `body` [batch, 1, draft_vocab].

    vocab: the target's, None is the draft's own. Unmapped ids are equal, one side padded.
    """
    given = ir.val("body", dtype=ir.DataType.FLOAT, shape=["batch", 1, draft_vocab])
    node = ir.node("Identity", [given])
    logits = node.outputs[0]
    logits.name, logits.dtype, logits.shape = "logits", given.dtype, given.shape
    graph = ir.Graph([given], [logits], nodes=[node], opset_imports={"": 24}, name="draft")
    model = ir.Model(graph, ir_version=10)
    d2t = trimmed(vocab, draft_vocab) if mapped and vocab is not None else None
    append_draft_sampling(model, d2t, vocab_size=vocab, q_over=q_over)
    return session(model)


def chains(batch: int, rows: int) -> Feed:
    """The tree inputs of rounds whose drafts follow one another, each drawn from its row of q."""
    return {name: np.repeat(value, batch, 0) for name, value in chain(rows - 1).items()}


def columns(rows: list[SamplingParams]) -> Feed:
    """The contract's sampling inputs, one value a row of the batch."""
    return {
        "temperature": np.array([r.temperature for r in rows], np.float32),
        "top_k": np.array([r.top_k for r in rows], np.int64),
        "top_p": np.array([r.top_p for r in rows], np.float32),
        "min_p": np.array([r.min_p for r in rows], np.float32),
    }


def neutral(rows: list[SamplingParams], vocab: int, width: int, drafted: int | None = None) -> Feed:
    """The contract's adjustments, asking for nothing; for a draft step with `drafted`."""
    feed = {
        n: np.repeat(v, len(rows), 0) for n, v in adjusting(rows[:1], [None], vocab, width).items()
    }
    if drafted is not None:
        feed["drafted_tokens"] = np.zeros((len(rows), drafted), np.int64)
    return feed


def law_of(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """`reference.transformed` over any leading axes."""
    flat = logits.reshape(-1, logits.shape[-1])
    return np.array([reference.transformed(row, params) for row in flat]).reshape(logits.shape)


@dataclass(frozen=True, kw_only=True)
class Round:
    """A batch of rounds: the accept graph's inputs and what made them."""

    vocab: int
    draft_vocab: int
    mapped: bool
    rows: list[SamplingParams]
    feed: Feed
    histories: list[History | None] = field(default_factory=list)

    @property
    def target_ids(self) -> np.ndarray | None:
        if not self.mapped:
            return None
        return trimmed(self.vocab, self.draft_vocab) + np.arange(self.draft_vocab)

    def run(self) -> list[np.ndarray]:
        graph = accept_session(self.vocab, self.draft_vocab, mapped=self.mapped)
        given = neutral(self._one_each, self.vocab, self._width)
        return graph.run(OUTPUTS, given | chains(len(self.feed["logits"]), self._width) | self.feed)

    @property
    def _one_each(self) -> list[SamplingParams]:
        return self.rows[:1] * len(self.feed["logits"])

    @property
    def _width(self) -> int:
        return int(self.feed["logits"].shape[1])

    def expected(self, row: int) -> reference.Decision:
        names = ("logits", "draft_tokens", "draft_probs", "accept_uniforms", "draw_uniforms")
        given = [self.feed[name][row] for name in names]
        history = self.histories[row] if self.histories else None
        return reference.accept(*given, self.rows[row], self.target_ids, history)


def row_of_logits(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Logits of one kind, the degenerate ones among them."""
    normal = rng.normal(0, 3, shape)
    rows = {
        "normal": lambda: normal,
        "one_hot": lambda: np.where(normal == normal.max(-1, keepdims=True), 80.0, -80.0),
        "uniform": lambda: np.zeros(shape),
        "ties": lambda: np.round(normal / 2),
        "banned": lambda: np.where(
            (rng.random(shape) < 0.5) & (normal < normal.max(-1, keepdims=True)), -np.inf, normal
        ),
        "huge": lambda: normal * 1e30,
        "steep": lambda: -1.5 * np.log1p(np.argsort(rng.random(shape), -1)) + 0.3 * normal,
        "flat": lambda: normal * 0.05,
    }
    return rows[kind]().astype(np.float32)


LOGIT_KINDS = ("normal", "one_hot", "uniform", "ties", "banned", "huge", "steep", "flat")
DRAFT_KINDS = ("same", "other", "disjoint", "one_hot", "close")


def draft_logits(
    rng: np.random.Generator, kind: str, target: np.ndarray, ids: np.ndarray
) -> np.ndarray:
    """The draft's logits [k, draft_vocab] beside the target's [k, vocab]."""
    padded = np.full((len(target), max(target.shape[1], ids.max() + 1)), -5.0, np.float32)
    padded[:, : target.shape[1]] = target
    seen = padded[:, ids]
    noise = rng.normal(0, 2, seen.shape).astype(np.float32)
    with np.errstate(invalid="ignore"):
        falling = np.where(np.isfinite(seen), -seen, 0)
    made = {
        "same": seen,
        "other": noise,
        "disjoint": np.clip(falling, -1e4, 1e4),
        "one_hot": np.where(noise == noise.max(-1, keepdims=True), 90.0, -90.0),
        "close": np.where(np.isfinite(seen), np.clip(seen, -1e6, 1e6), -40) + 0.2 * noise,
    }[kind]
    made = np.where(np.isneginf(made).all(-1, keepdims=True), 0, made)
    return made.astype(np.float32)


@dataclass(kw_only=True)
class Tally:
    """How many cases a property saw, and how many were too near an edge to judge."""

    cases: int = 0
    excluded: int = 0
    notes: list[str] = field(default_factory=list)

    def count(self, margin: float) -> bool:
        """Count one case; true where its decision must match."""
        self.cases += 1
        self.excluded += margin < 1
        return margin >= 1


Law = Callable[[tuple[int, ...]], np.ndarray]  # prefix → probabilities over the target's ids


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The parts of the acceptance rule that a planted fault replaces."""

    acceptance: Callable[[np.ndarray, np.ndarray, int], float] = reference.acceptance
    recovered: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda p, q: (
        reference.recovered(p, q) / reference.recovered(p, q).sum()
    )
    q_reported: Law | None = None  # what the rule is told; None is what was drawn from
    bonus_row: int = 0  # 0 is row k, −1 the row before it


def round_law(target: Law, draft: Law, k: int, rule: Rule | None = None) -> dict[tuple, float]:
    """Law of the k + 1 tokens after a round, uniforms integrated out.

    Every draft path is enumerated, every place where it may be cut, and every token drawn there; a
    round that ends early is completed by the target itself, so the exact rule gives the target's
    own law.
    """
    rule = rule or Rule()
    law: dict[tuple, float] = {}
    for prefix, mass in _ends(target, draft, k, rule):
        for rest, share in sequences(target, prefix, k + 1 - len(prefix)):
            law[rest] = law.get(rest, 0.0) + mass * share
    return law


def sequences(
    law: Law, prefix: tuple[int, ...], length: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every continuation of a prefix with its probability."""
    if length == 0:
        yield prefix, 1.0
        return
    for token, p in enumerate(law(prefix)):
        if p > 0:
            for rest, share in sequences(law, (*prefix, token), length - 1):
                yield rest, p * share


def _ends(target: Law, draft: Law, k: int, rule: Rule) -> Iterator[tuple[tuple[int, ...], float]]:
    """Committed tokens of one round and their probability."""
    reported = rule.q_reported or draft
    alive: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(k):
        survivors = []
        for prefix, mass in alive:
            p, q = target(prefix), reported(prefix)
            for x in np.flatnonzero(draft(prefix)):
                a = rule.acceptance(p, q, int(x))
                drafted = mass * draft(prefix)[x]
                survivors.append(((*prefix, int(x)), drafted * a))
                if a < 1:
                    for y, r in enumerate(rule.recovered(p, q)):
                        yield (*prefix, y), drafted * (1 - a) * r
        alive = [(prefix, mass) for prefix, mass in survivors if mass > 0]
    for prefix, mass in alive:
        bonus = target(prefix[:-1] if rule.bonus_row else prefix)
        for y, p in enumerate(bonus):
            yield (*prefix, y), mass * p


def total_variation(one: dict[tuple, float], other: dict[tuple, float]) -> float:
    keys = set(one) | set(other)
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in keys)


def all_prefixes(vocab: int, most: int) -> list[tuple[int, ...]]:
    return [p for n in range(most + 1) for p in itertools.product(range(vocab), repeat=n)]
