"""Decoding in NumPy from the definitions, with every transform: the tokens a Decoder must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from helpers_runtime import EOS, VOCAB, logits_after, near_table, target_table

from runtime.decoder import Decoder, Result
from runtime.grammar_compiler import GrammarCompiler
from runtime.reference import History, accept, adjusted, draft_sample
from runtime.sampling import SamplingParams
from runtime.sequence import FinishReason
from runtime.uniforms import ACCEPT, DRAFT, DRAW, uniform_table

Array = np.ndarray

KS = (0, 1, 2, 3, 4)
TOKENS = 24
PROMPT = (70, 71, 71, 101, 3)
TABLE = target_table(VOCAB)
TABLE[:, EOS] = TABLE.max(1) - 1.0  # the end is always likely, so that it must be kept away
NEAR = near_table(TABLE, 0.6)
FAVOURITES = tuple(int(t) for t in np.argsort(-TABLE.mean(0))[:40])

ASKED = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.8},
    "frequency": {"frequency_penalty": -1.5},
    "bias": {"logit_bias": dict.fromkeys(FAVOURITES[:6], 4.0) | {EOS: -100.0}},
    "bans": {"banned_tokens": (*FAVOURITES, EOS)},
    "min_tokens": {"min_tokens": 11, "logit_bias": {EOS: 2.0}},
    "together": {
        "repetition_penalty": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": {FAVOURITES[0]: 5.0, FAVOURITES[1]: 3.0},
        "banned_tokens": FAVOURITES[2:9],
        "min_tokens": 7,
    },
}
SAMPLED = {"temperature": 0.9, "top_p": 0.97, "top_k": 60, "seed": 11}


@dataclass(frozen=True, kw_only=True)
class Mask:
    """What may follow an answer: straight from the definitions, read anew each time."""

    params: SamplingParams
    vocab: int
    eos: tuple[int, ...] = (EOS,)
    compiler: GrammarCompiler | None = None  # for params.grammar

    def row(self, output: Sequence[int]) -> tuple[Array, FinishReason | None]:
        """[vocab] bool; where nothing may follow everything, and why."""
        row, everything = np.ones(self.vocab, np.bool_), np.ones(self.vocab, np.bool_)
        if self.params.grammar is not None:
            assert self.compiler is not None
            matcher = self.compiler.compile(self.params.grammar)
            for token in output:
                matcher.advance(token)
            if matcher.complete:
                return everything, FinishReason.GRAMMAR
            matcher.allow(row)
        row[list(self.params.banned_tokens)] = False
        if len(output) < self.params.min_tokens:
            row[list(self.eos)] = False
        return (row, None) if row.any() else (everything, FinishReason.DEAD_END)


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Speculative decoding of table models, one token after another."""

    target: Array  # [STATES, vocab]
    draft: Array  # [STATES, draft_vocab]
    prompt: tuple[int, ...]
    params: SamplingParams
    mask: Mask
    target_ids: Array | None = None  # [draft_vocab]

    def decode(self, k: int) -> tuple[list[int], FinishReason]:
        """The answer and why it ended; the prompt's own row gives its first token."""
        assert self.params.max_tokens is not None
        output: list[int] = []
        drafting = 0
        while True:
            for token in self._round(output, drafting):
                output.append(token)
                reason = self._ended(output)
                if reason is not None:
                    return output, reason
            drafting = k

    def _round(self, output: list[int], k: int) -> list[int]:
        drafts, q = self._drafts(output, k)
        uniforms, at = self._uniforms(), len(self.prompt) + len(output)
        prefixes = [[*output, *drafts[:i]] for i in range(len(drafts) + 1)]
        masks = np.stack([self.mask.row(prefix)[0] for prefix in prefixes])
        decision = accept(
            np.stack([logits_after(self.target, [*self.prompt, *p]) for p in prefixes]),
            np.array(drafts, np.int64),
            q,
            uniforms[ACCEPT, at : at + len(drafts)],
            uniforms[DRAW, at : at + len(drafts) + 1],
            self.params,
            self.target_ids,
            History(prompt=self.prompt, output=tuple(output), allowed=masks),
        )
        return [*drafts[: decision.num_accepted], decision.next_token]

    def _drafts(self, output: list[int], k: int) -> tuple[list[int], Array]:
        drafts: list[int] = []
        rows: list[Array] = []
        while len(drafts) < k:
            prefix = [*output, *drafts]
            allowed, over = self.mask.row(prefix)
            logits = self._draft_logits(prefix, allowed)
            if over or not np.isfinite(logits).any():
                break
            uniform = self._uniforms()[DRAFT, len(self.prompt) + len(prefix)]
            token, q, _ = draft_sample(logits, uniform, self.params, self.target_ids)
            drafts.append(token)
            rows.append(q.astype(np.float32))
        return drafts, np.array(rows, np.float32).reshape(len(drafts), self.draft.shape[1])

    def _draft_logits(self, prefix: list[int], allowed: Array) -> Array:
        logits = logits_after(self.draft, [*self.prompt, *prefix])
        now = History(prompt=self.prompt, output=tuple(prefix), allowed=allowed)
        if self.target_ids is not None:
            return adjusted(logits, self.params, now, self.target_ids)
        known = min(len(logits), self.mask.vocab)  # the rest is padding, which is never drafted
        padding = np.full(len(logits) - known, -np.inf, np.float32)
        return np.append(adjusted(logits[:known], self.params, now, np.arange(known)), padding)

    def _uniforms(self) -> Array:
        count = len(self.prompt) + (self.params.max_tokens or 0) + 9
        return uniform_table(self.params.seed or 0, count)

    def _ended(self, output: list[int]) -> FinishReason | None:
        if output[-1] in self.mask.eos:
            return FinishReason.EOS
        over = self.mask.row(output)[1]
        if over is FinishReason.GRAMMAR or len(output) < (self.params.max_tokens or 0):
            return over
        return FinishReason.LENGTH


def params_of(name: str, **others: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, **ASKED[name], **others})  # type: ignore[arg-type]


def oracle(
    params: SamplingParams,
    *,
    target: np.ndarray = TABLE,
    draft: np.ndarray = NEAR,
    prompt: tuple[int, ...] = PROMPT,
    target_ids: np.ndarray | None = None,
    compiler: GrammarCompiler | None = None,
) -> Oracle:
    mask = Mask(params=params, vocab=target.shape[1], compiler=compiler)
    return Oracle(
        target=target, draft=draft, prompt=prompt, params=params, mask=mask, target_ids=target_ids
    )


def generate(decoder: Decoder, params: SamplingParams, k: int) -> Result:
    return decoder.generate(list(PROMPT), params, num_draft_tokens=k)


def came_out(result: Result) -> tuple[list[int], FinishReason]:
    return list(result.token_ids), result.finish_reason
