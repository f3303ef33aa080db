"""Decoding in NumPy from the definitions, with every transform: the tokens a Decoder must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from helpers_runtime import EOS, logits_after

from runtime.grammar_compiler import GrammarCompiler
from runtime.reference import History, accept, adjusted, draft_sample
from runtime.sampling import SamplingParams
from runtime.sequence import FinishReason
from runtime.uniforms import ACCEPT, DRAFT, DRAW, uniform_table

Array = np.ndarray


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
