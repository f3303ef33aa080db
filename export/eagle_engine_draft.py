"""An EAGLE head as engines: `draft`, `fuse` of EAGLE-3, `branch` for trees; their gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.tensorrt.ranges import branch_profiles, eagle_profiles, fuse_profiles
from runtime.contract import CacheSpec, GraphSpec, eagle_branch_graph, eagle_graph
from runtime.engine_contract import engine_spec
from runtime.executor import EngineOptions
from runtime.manifest import Gate, Limits

from .draft_plan import States, WrittenDraft
from .draft_vocabulary import DraftVocabulary
from .eagle_draft import EagleDraftPlan
from .eagle_engine import EagleGraphs, fuse_engine_precision, write_eagle_graphs
from .eagle_gates import HeadWeights, eager_bytes, head_parity, laws
from .eagle_rows import HeadGraph, QShape, graph_rows, joined
from .engine_gates import AS_WRITTEN
from .engine_head import EngineHead, PlanOrder, typed_gate, unchecked
from .engine_precision import EnginePrecision
from .ranking_gate import BranchInputs, branch_gates

Array = np.ndarray


def write_eagle_head(
    draft: EagleDraftPlan,
    precision: EnginePrecision,
    limits: Limits,
    scratch: Path,
    *,
    target_vocab: int,
) -> EngineHead:
    """Raises BuildError."""
    head, context = draft.head, draft.context
    vocabulary = DraftVocabulary(target_size=target_vocab, size=head.vocab_size, d2t=head.d2t)
    graphs = write_eagle_graphs(
        head, precision, context, scratch,
        vocabulary=vocabulary, trees=limits.max_tree_nodes > 0,
    )  # fmt: skip
    checks = _Checks(draft=draft, precision=precision, graphs=graphs, vocabulary=vocabulary)
    written = WrittenDraft(
        card=draft.card(graphs.head.cache, precision),
        vocab_size=head.vocab_size,
        d2t=head.d2t,
        gates=lambda tokens, states: checks.gates(tokens, states),
    )
    return EngineHead(
        written=written,
        orders=_orders(graphs, limits, context),
        gates=checks.gates,
        law=checks.law,
    )


def _orders(graphs: EagleGraphs, limits: Limits, context: int) -> tuple[PlanOrder, ...]:
    found = [
        PlanOrder(name="draft", path=graphs.head.path, profiles=eagle_profiles(limits, context))
    ]
    if graphs.fuse is not None:
        profiles = fuse_profiles(limits, context)
        found.append(PlanOrder(name="fuse", path=graphs.fuse.path, profiles=profiles))
    if graphs.branch is not None:
        profiles = branch_profiles(limits, context)
        found.append(PlanOrder(name="branch", path=graphs.branch.path, profiles=profiles))
    return tuple(found)


class _EngineHeadGraph(HeadGraph):
    """The lowered head on ONNX Runtime's CPU, reading no more cache rows than there are."""

    @staticmethod
    def _spec(cache: CacheSpec) -> GraphSpec:
        return engine_spec(eagle_graph(cache))

    @staticmethod
    def _options() -> EngineOptions:
        return AS_WRITTEN

    def _sizes(self, rows: int) -> dict[str, Array]:
        return {"context_slots": np.zeros(rows, np.int32)}


@dataclass(frozen=True, kw_only=True)
class _Checks:
    draft: EagleDraftPlan
    precision: EnginePrecision
    graphs: EagleGraphs
    vocabulary: DraftVocabulary

    def gates(self, tokens: Sequence[int], states: States) -> list[Gate]:
        """Against the eager head, in fp16 against f32, and the ranking. Raises GateFailed."""
        tokens = list(tokens[: self.draft.context])
        if self.graphs.head.exact is None:
            return [unchecked(eager_bytes(self.draft.head))]
        features, exact = states(tokens), _Paths.exact(self.graphs)
        rows = self._rows(exact, tokens, features)
        found = [head_parity(self.draft.head, self._weights(), lambda: rows, tokens, features)]
        width = rows.shape[1]
        found.append(
            typed_gate(
                lambda: laws(self._rows(_Paths.typed(self.graphs), tokens, features), width),
                laws(rows, width),
                self.precision,
            )
        )
        if self.graphs.branch is not None:
            given = BranchInputs(
                tokens=tokens[1:],
                spec=eagle_branch_graph(self.graphs.branch.exact_cache),
                inputs={"states": self._states(exact, features)[:, :-1]},
                outputs={"next_state": np.zeros((1, len(tokens) - 1, self._width), np.float32)},
            )
            law = self.law(tokens, lambda _: features)
            found += branch_gates(self.graphs.branch, law, self.vocabulary, given)
        return found

    def law(self, tokens: Sequence[int], states: States) -> Array | None:
        if self.graphs.head.exact is None:
            return None
        tokens = list(tokens[: self.draft.context])
        exact = _Paths.exact(self.graphs)
        rows = self._states(exact, states(tokens))
        head = self._head(exact)
        return np.stack([head.step([t], rows[:, i : i + 1]) for i, t in enumerate(tokens[1:])])

    @property
    def _width(self) -> int:
        return int(self.draft.head.config.hidden_size)

    def _weights(self) -> HeadWeights:
        fuse = self.graphs.fuse.rounded if self.graphs.fuse else frozenset[str]()
        return HeadWeights(
            layer=self.precision,
            fuse=fuse_engine_precision(self.precision),
            rounded=self.graphs.head.rounded | fuse,
        )

    def _rows(self, paths: _Paths, tokens: Sequence[int], features: Array) -> Array:
        shape = QShape(size=self.vocabulary.size)
        return graph_rows(self._head(paths), tokens, self._states(paths, features), shape)

    def _states(self, paths: _Paths, features: Array) -> Array:
        rows = np.asarray(features[None], np.float32)
        if paths.fuse is None:
            return rows
        return joined(paths.fuse, rows, self._width, lambda: AS_WRITTEN)

    def _head(self, paths: _Paths) -> HeadGraph:
        return _EngineHeadGraph(paths.head, paths.cache, self._width, self.vocabulary.size)


@dataclass(frozen=True, kw_only=True)
class _Paths:
    """The head's graphs in one arithmetic."""

    head: Path
    cache: CacheSpec
    fuse: Path | None

    @classmethod
    def exact(cls, graphs: EagleGraphs) -> _Paths:
        head, fuse = graphs.head, graphs.fuse
        assert head.exact is not None  # or nothing is compared
        return cls(head=head.exact, cache=head.exact_cache, fuse=fuse.exact if fuse else None)

    @classmethod
    def typed(cls, graphs: EagleGraphs) -> _Paths:
        head, fuse = graphs.head, graphs.fuse
        return cls(head=head.path, cache=head.cache, fuse=fuse.path if fuse else None)
