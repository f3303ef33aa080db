"""The sampling rules in NumPy, as the papers write them: what the graphs are tested against.

Everything is computed in float64 from the graphs' float32 inputs. A graph rounds, so a comparison
that falls within rounding of its edge may go either way; `Edges` keeps how near the nearest
comparison came, in units of the graph's rounding bound, and a test may excuse a difference only
below 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .sampling import SamplingParams

LEAST_RESIDUAL = 1e-6  # a lighter max(p − q, 0) is rounding: draw from p
Q_SUM_SLACK = 0.01  # a row of q further from 1 is no distribution

# Bounds on what float32 may do to one comparison.
MASS_ERROR = 1e-6  # of a cumulative sum, of total mass 1: a few hundred roundings of 6e-8
EXP_ERROR = 4e-6  # relative, of one p; plus 3e-7 for each unit of (l − peak) / T
EXPONENT_ERROR = 3e-7
UNDERFLOW = 1e-36  # p below is 0 or denormal in float32

Array = np.ndarray


@dataclass(kw_only=True)
class Edges:
    """The nearest that any comparison came to its edge; 1 is the graph's rounding bound."""

    nearest: float = float("inf")

    def note(self, distance: Array | float, bound: Array | float) -> None:
        ratios = np.abs(distance) / bound
        if np.size(ratios):
            self.nearest = min(self.nearest, float(np.min(ratios)))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How one round of one sequence ends."""

    num_accepted: int
    next_token: int  # recovered or bonus
    margin: float  # nearest comparison over its rounding bound: below 1 a graph may differ


@dataclass(frozen=True, kw_only=True)
class History:
    """What a row's penalties count, and what its mask allows."""

    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    allowed: Array | None = None  # [vocab] bool; None allows all


def adjusted(
    logits: Array,  # [vocab] f32
    params: SamplingParams,
    history: History,
    target_ids: Array
    | None = None,  # [vocab], the target token of each, where logits are a draft's
) -> Array:  # [vocab] f32
    """Logits after penalties, bias and mask, in float32 as the graphs compute them."""
    f32 = np.float32
    ids = np.arange(len(logits)) if target_ids is None else target_ids
    counts = np.array([history.output.count(i) for i in ids.tolist()], f32)
    seen = np.isin(ids, [*history.prompt, *history.output])
    bias = np.array([params.logit_bias.get(i, 0.0) for i in ids.tolist()], f32)
    factor = np.where(seen, f32(params.repetition_penalty), f32(1))
    scaled = np.where(logits > 0, logits / factor, logits * factor)
    present = (counts > 0).astype(f32)
    penalty = f32(params.presence_penalty) * present + f32(params.frequency_penalty) * counts
    result: Array = (scaled + (bias - penalty)).astype(f32)
    if history.allowed is not None:
        result = np.where(history.allowed[ids], result, f32(-np.inf))
    return result


def transformed(
    logits: Array,  # [vocab] f32
    params: SamplingParams,
    edges: Edges | None = None,
) -> Array:  # [vocab] f64
    """p after temperature → top-k → top-p → min-p → normalise; one-hot when greedy."""
    values = np.asarray(logits, dtype=np.float64)
    if params.greedy:
        return one_hot(int(values.argmax()), len(values))
    edges = edges or Edges()
    exponents = (values - values.max()) / np.float32(params.temperature)
    weights = np.exp(exponents)
    if params.top_k:
        weights = weights * (values >= np.sort(values)[-min(params.top_k, len(values))])
    if params.top_p < 1:
        weights = weights * _within_top_p(values, weights, np.float32(params.top_p), edges)
    if params.min_p > 0:
        weights = weights * _within_min_p(weights, exponents, np.float32(params.min_p), edges)
    p: Array = weights / weights.sum()
    return p


def draft_sample(
    logits: Array,  # [draft_vocab] f32
    uniform: float,
    params: SamplingParams,
    target_ids: Array | None = None,  # [draft_vocab], the target token of each draft token
) -> tuple[int, Array, float]:
    """Target id of the drawn token, the q it was drawn from, and the margin."""
    edges = Edges()
    q = transformed(logits, params, edges)
    token = int(q.argmax()) if params.greedy else draw(q, uniform, edges)
    return (token if target_ids is None else int(target_ids[token])), q, edges.nearest


def accept(
    logits: Array,  # [k + 1, vocab] f32
    draft_tokens: Array,  # [k] i64, target ids
    draft_probs: Array,  # [k, draft_vocab] f32
    accept_uniforms: Array,  # [k] f32
    draw_uniforms: Array,  # [k + 1] f32
    params: SamplingParams,
    target_ids: Array | None = None,  # [draft_vocab]
    history: History | None = None,  # of row 0; its allowed [k + 1, vocab]
) -> Decision:
    """Algorithm 1 of Leviathan et al. (2023) for one sequence."""
    edges = Edges()
    if history is not None:
        logits = _adjusted_rows(logits, draft_tokens, params, history)
    for i, x in enumerate(draft_tokens):
        p = transformed(logits[i], params, edges)
        q = over_target(draft_probs[i], len(p), target_ids)
        if not accepts(p, q, int(x), accept_uniforms[i], params, edges):
            return _ended(i, recovered(p, q, edges), draw_uniforms[i], params, edges)
    k = len(draft_tokens)
    return _ended(k, transformed(logits[k], params, edges), draw_uniforms[k], params, edges)


def _adjusted_rows(
    logits: Array, draft_tokens: Array, params: SamplingParams, history: History
) -> Array:
    """Row i behind the first i drafts, as plain decoding would find it."""
    rows = []
    for i, row in enumerate(logits):
        output = (*history.output, *(int(x) for x in draft_tokens[:i]))
        allowed = None if history.allowed is None else history.allowed[i]
        rows.append(adjusted(row, params, replace(history, output=output, allowed=allowed)))
    return np.array(rows)


def accepts(
    p: Array, q: Array, x: int, u: float, params: SamplingParams, edges: Edges | None = None
) -> bool:
    """u · q(x) < p(x); p and q over one vocabulary, or q over a longer, padded one."""
    if x >= len(p) or not q[x] > 0:
        return False
    if params.greedy:
        return bool(p[x] == 1)
    if not is_distribution(q):
        return False
    left, right = float(u) * q[x], p[x]
    relative = EXP_ERROR - EXPONENT_ERROR * np.log(max(right / p.max(), 1e-300))
    if right > 0:
        (edges or Edges()).note(left - right, relative * max(left, right) + UNDERFLOW)
    return bool(left < right)


def acceptance(p: Array, q: Array, x: int) -> float:
    """Probability over u that x is accepted: min(1, p/q)."""
    return float(min(1.0, p[x] / q[x])) if q[x] > 0 and is_distribution(q) else 0.0


def recovered(p: Array, q: Array, edges: Edges | None = None) -> Array:  # unnormalised
    """max(p − q, 0), or p where q is no distribution or nothing is left."""
    if not is_distribution(q):
        return p
    residual = np.maximum(p - q[: len(p)], 0)
    (edges or Edges()).note(residual.sum() - LEAST_RESIDUAL, LEAST_RESIDUAL / 2)
    return residual if residual.sum() > LEAST_RESIDUAL else p


def draw(weights: Array, uniform: float, edges: Edges | None = None) -> int:
    """First token whose cumulative weight exceeds u · total; never one of weight 0."""
    positive = np.flatnonzero(weights > 0)
    cumulative = np.cumsum(weights[positive])
    target = float(uniform) * cumulative[-1]
    (edges or Edges()).note(cumulative[:-1] - target, MASS_ERROR)
    return int(positive[np.searchsorted(cumulative[:-1], target, side="right")])


def over_target(q: Array, vocab_size: int, target_ids: Array | None = None) -> Array:
    """A draft's q over the target's ids; longer than the vocabulary where the draft is padded."""
    ids = np.arange(len(q)) if target_ids is None else target_ids
    spread = np.zeros(max(vocab_size, len(q)))
    spread[ids] = q
    return spread


def one_hot(token: int, size: int) -> Array:
    row = np.zeros(size)
    row[token] = 1
    return row


def is_distribution(q: Array) -> bool:
    """Whether q sums to 1, near enough; false for NaN."""
    return bool(abs(q.sum() - 1) < Q_SUM_SLACK)


def _ended(
    row: int, weights: Array, uniform: float, params: SamplingParams, edges: Edges
) -> Decision:
    token = int(weights.argmax()) if params.greedy else draw(weights, uniform, edges)
    return Decision(num_accepted=row, next_token=token, margin=edges.nearest)


def _within_top_p(values: Array, weights: Array, top_p: np.float32, edges: Edges) -> Array:
    """Tokens with less than top_p of the mass strictly in front of them."""
    falling = np.sort(-values)
    cumulative = np.concatenate([[0.0], np.cumsum(-np.sort(-weights))])
    ahead = cumulative[np.searchsorted(falling, -values, side="left")] / weights.sum()
    open_cases = (ahead > 0) & (weights > 0)
    edges.note(ahead[open_cases] - top_p, MASS_ERROR)
    kept: Array = ahead < top_p
    return kept


def _within_min_p(weights: Array, exponents: Array, min_p: np.float32, edges: Edges) -> Array:
    """Tokens of at least min_p times the largest p, whose weight is 1."""
    open_cases = (exponents < 0) & (weights > 0)
    relative = EXP_ERROR - EXPONENT_ERROR * exponents[open_cases]
    edges.note(weights[open_cases] / min_p - 1, relative)
    kept: Array = weights >= min_p
    return kept
