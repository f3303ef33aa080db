"""Medusa heads as engines: `heads`, and in f32, as acceptance is, `tail` and `rank`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.external_data import WeightStore, save
from engines.tensorrt.ranges import heads_profiles, rank_profiles, tail_profiles
from runtime.contract import BRANCH_WIDTH, rank_graph
from runtime.executor import Executor
from runtime.manifest import Gate, Limits

from .branch_tail import rank_model
from .draft_plan import States, WrittenDraft
from .draft_tail import tail_model
from .draft_vocabulary import DraftVocabulary
from .eagle_graph import rounded_names
from .engine_gates import AS_WRITTEN
from .engine_graphs import LoweredGraph, write_lowered
from .engine_head import EngineHead, PlanOrder, typed_gate, unchecked
from .engine_precision import EnginePrecision
from .medusa_draft import MedusaDraftPlan, heads_parity, heads_rows
from .ranking_gate import ranking

Array = np.ndarray


def write_medusa_heads(
    draft: MedusaDraftPlan,
    precision: EnginePrecision,
    limits: Limits,
    scratch: Path,
    *,
    target_vocab: int,
) -> EngineHead:
    """Raises BuildError."""
    size, d2t = draft.heads.vocab_size, draft.ascending()
    graph = write_lowered(
        "heads", draft.portable(), precision, scratch,
        rounded=rounded_names, eager_bytes=draft.eager_bytes(),
    )  # fmt: skip
    store = WeightStore(directory=scratch)
    tail = save(tail_model(size, d2t, vocab_size=target_vocab), "tail", store)
    orders = [PlanOrder(name="heads", path=graph.path, profiles=heads_profiles(limits))]
    orders.append(PlanOrder(name="tail", path=tail, profiles=tail_profiles(limits)))
    rank = None
    if limits.max_tree_nodes:
        rank = save(rank_model(size, d2t, target_vocab), "rank", store)
        profiles = rank_profiles(limits, draft.count)
        orders.append(PlanOrder(name="rank", path=rank, profiles=profiles))
    vocabulary = DraftVocabulary(target_size=target_vocab, size=size, d2t=d2t)
    checks = _Checks(draft=draft, precision=precision, graph=graph, rank=rank, tokens=vocabulary)
    written = WrittenDraft(card=draft.card(precision), vocab_size=size, d2t=d2t, gates=checks.gates)
    return EngineHead(written=written, orders=tuple(orders), gates=checks.gates, law=checks.law)


@dataclass(frozen=True, kw_only=True)
class _Checks:
    draft: MedusaDraftPlan
    precision: EnginePrecision
    graph: LoweredGraph
    rank: Path | None
    tokens: DraftVocabulary

    def gates(self, tokens: Sequence[int], states: States) -> list[Gate]:
        """Against the eager heads, in fp16 against f32, and the ranking. Raises GateFailed."""
        if self.graph.exact is None:
            return [unchecked(self.draft.eager_bytes())]
        rows = states(tokens)[:, None]  # a row a batch
        exact = self._rows(self.graph.exact, rows)
        found = [
            heads_parity(self.draft, self.precision, self.graph.rounded, exact, rows),
            typed_gate(lambda: self._rows(self.graph.path, rows), exact, self.precision),
        ]
        if self.rank is not None:
            found.append(self._ranked(self.rank, exact[-1:]))
        return found

    def law(self, tokens: Sequence[int], states: States) -> Array | None:
        """Of the first head, which drafts the token behind a text's last."""
        if self.graph.exact is None:
            return None
        rows = states(tokens)[:-1, None]
        return _softmax(self._rows(self.graph.exact, rows)[:, 0])

    def _rows(self, path: Path, states: Array) -> Array:
        return heads_rows(self.draft, path, states, AS_WRITTEN)

    def _ranked(self, rank: Path, logits: Array) -> Gate:
        """logits [1, heads, D]."""
        tokens = np.zeros((*logits.shape[:2], BRANCH_WIDTH), np.int64)
        probs = np.zeros(tokens.shape, np.float32)
        graph = Executor.load(rank, rank_graph(), AS_WRITTEN)
        graph.bind({"logits": logits}, {"top_tokens": tokens, "top_probs": probs}).run()
        known = self.tokens.target_ids()
        return ranking(tokens[0], probs[0], _softmax(logits[0]), known)


def _softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True), np.float32)
