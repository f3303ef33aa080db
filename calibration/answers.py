"""What the reference itself writes behind each prompt: the text that a target will read in use.

Codes chosen on prompts alone serve prompts. On SmolLM2-135M-Instruct the KL on text of its own
falls from 0.18 to 0.12 where as much of its own text is read beside 2,700 tokens of prompts.
Answers are drawn at temperature 1 from numbers that belong to their place, so they are the same
each time; each is on disk before the next one is begun.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.contract import CacheSpec, target_graph
from runtime.executor import EngineOptions, Executor
from runtime.reference import draw
from runtime.uniforms import DRAW, uniform_table

from .comparison.graphs import CHUNK, CachedGraph
from .comparison.law import law

logger = logging.getLogger(__name__)

Tokens = tuple[int, ...]
ANSWER_TOKENS = 64
TOLD_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The reference graph at `path`, and where answers are kept."""

    path: Path
    cache: CacheSpec
    vocab: int
    eos_token_ids: frozenset[int]
    kept: Path
    options: EngineOptions
    tell: Callable[[str], None] = lambda _: None

    def answered(self, prompts: Sequence[Tokens]) -> list[Tokens]:
        """Each prompt with its answer, which ends with an end token or the context."""
        answers = self._kept(prompts)
        graph = self._open() if len(answers) < len(prompts) else None
        for i in range(len(answers), len(prompts)):
            assert graph is not None  # opened where an answer is missing
            answers.append(self._answer(graph, prompts[i], i))
            self._keep(answers)
            if (i + 1) % TOLD_EVERY == 0 or i + 1 == len(prompts):
                self.tell(f"calibrating: {i + 1} of {len(prompts)} texts written")
        return [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def _open(self) -> CachedGraph:
        spec, sizes = target_graph(self.cache), {"vocab": self.vocab}
        executor = Executor.load(self.path, spec, self.options)
        return CachedGraph(executor, spec, self.cache, sizes)

    def _answer(self, graph: CachedGraph, prompt: Tokens, seed: int) -> Tokens:
        uniforms = uniform_table(seed, ANSWER_TOKENS)[DRAW]
        room = min(ANSWER_TOKENS, self.cache.max_context - len(prompt))
        graph.length, unread, answer = 0, prompt, list[int]()
        for uniform in uniforms[:room]:
            answer.append(draw(law(self._last_row(graph, unread), 1.0), float(uniform)))
            unread = (answer[-1],)
            if answer[-1] in self.eos_token_ids:
                break
        return tuple(answer)

    def _last_row(self, graph: CachedGraph, tokens: Tokens) -> np.ndarray:
        logits = np.zeros((1, 1, self.vocab), np.float32)
        one = {"num_logits": np.array(1, np.int64)}
        for start in range(0, len(tokens), CHUNK):
            graph.run(tokens[start : start + CHUNK], one, {"logits": logits})
        return logits[0, 0]

    def _kept(self, prompts: Sequence[Tokens]) -> list[Tokens]:
        """Of an earlier run that was interrupted; a folder belongs to one set of prompts."""
        try:
            rows = json.loads(self.kept.read_text(encoding="utf-8"))
            return [tuple(map(int, row)) for row in rows][: len(prompts)]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s: starting anew: %s", self.kept, error)
            return []

    def _keep(self, answers: Sequence[Tokens]) -> None:
        partial = self.kept.with_suffix(".partial")
        partial.write_text(json.dumps(answers), encoding="utf-8")
        partial.replace(self.kept)
