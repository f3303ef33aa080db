"""A bundle of TensorRT engines: the same checks as any build's, then a plan for each graph.

The graphs are written, held against the checkpoints on the CPU, built into plans, and dropped: what
a machine with a GPU needs is in `engines/`. A draft may run on ONNX Runtime's CPU instead
(`--draft-backend onnxruntime`); what crosses then is tokens, rows of q and, of a head, the target's
states.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from engines.external_data import WeightStore
from engines.tensorrt.build import BuildOptions, TimingCache, build_plan
from engines.tensorrt.package import Library, load
from engines.tensorrt.ranges import (
    Profile,
    accept_profiles,
    branch_profiles,
    draft_profiles,
    tail_profiles,
    target_profiles,
    tree_round_profiles,
)
from runtime.cards import ModelDraft
from runtime.contract import CacheSpec, branch_graph
from runtime.errors import BuildError
from runtime.manifest import EngineCard, Gate, Limits

from .checkpoint import Checkpoint
from .draft_plan import DraftPlan, WrittenDraft
from .draft_vocabulary import DraftVocabulary, QOver
from .engine_gates import (
    draft_gates,
    exact_logits,
    exact_probs,
    exact_states,
    skipped,
    states_gates,
    target_gates,
)
from .engine_graphs import (
    EngineGraph,
    write_branch_graph,
    write_draft_graph,
    write_draft_tail,
    write_target_graph,
)
from .engine_heads import HeadPlan, head_name, write_engine_head
from .engine_precision import EnginePrecision
from .graphs import write_accept
from .layer_skip_draft import LayerSkipPlan
from .model_card import model_card
from .model_draft import ModelDraftPlan
from .ngram_draft import NgramDraftPlan
from .oracle import record
from .precision import Precision
from .ranking_gate import BranchInputs, branch_gates
from .tree_round_graphs import write_tree_round

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class EngineBuild:
    """What is asked of the engines of one bundle."""

    backend: str
    precision: EnginePrecision
    draft_precision: EnginePrecision
    options: BuildOptions
    draft_backend: str  # the same, or onnxruntime

    def calibrated(self, recipe: Precision) -> EngineBuild:
        """With what the target's recipe will find in its texts."""
        return replace(self, precision=replace(self.precision, recipe=recipe))

    def open_library(self) -> Library:
        """Before anything slow. Raises BuildError."""
        return load(self.backend)


@dataclass(frozen=True, kw_only=True)
class WrittenEngines:
    target: EngineGraph
    draft: WrittenDraft | None
    card: EngineCard
    gates: Callable[[list[int]], tuple[Gate, ...]]


def refuse_draft(draft: DraftPlan | None, asked: EngineBuild) -> None:
    """Raises BuildError for a drafter that engines can't carry yet."""
    if draft is None or isinstance(draft, NgramDraftPlan | ModelDraftPlan | HeadPlan):
        return
    if isinstance(draft, LayerSkipPlan):
        raise BuildError(
            f"--draft: received {draft.name} with --backend {asked.backend}. Expected another "
            "drafter: the target's engine has all its layers; use --backend onnxruntime."
        )
    if asked.draft_backend != "onnxruntime":
        raise BuildError(
            f"--draft: received {draft.name} with --backend {asked.backend}. Expected a draft "
            "model, an EAGLE or Medusa head, ngram or none on engines; others run beside them on "
            "the CPU: add --draft-backend onnxruntime."
        )


def write_engines(
    asked: EngineBuild,
    target: Checkpoint,
    draft: DraftPlan | None,
    limits: Limits,
    directory: Path,
    progress: Progress,
) -> WrittenEngines:
    """Fill `directory`/engines, and onnx/ with what runs on the CPU. Raises BuildError."""
    builder = _Builder(asked, limits, directory, progress)
    progress(f"tracing and writing the target, {target.name}, {asked.precision.name}")
    graph = write_target_graph(
        target, asked.precision, limits.max_context, builder.scratch,
        taps=draft.taps if draft else (), trees=builder.trees,
    )  # fmt: skip
    written, draft_checks = builder.draft(draft, graph)
    builder.accept(graph.vocab_size, written)

    def gates(tokens: list[int]) -> tuple[Gate, ...]:
        k = max(1, min(limits.max_draft_tokens, len(tokens) // 3))
        progress("checking the graphs against the checkpoints")
        found = target_gates(target, graph, asked.precision, tokens, k) + draft_checks(tokens)
        if draft and draft.taps:
            found += states_gates(target, graph, asked.precision, tokens, draft.taps)
        builder.plan("target", graph.path, target_profiles(limits))
        builder.record(graph, written, tokens)
        builder.finish()
        return tuple(found)

    return WrittenEngines(target=graph, draft=written, card=builder.card(), gates=gates)


class _Builder:
    """Writes plans one by one; graphs lie in a scratch directory that goes in the end."""

    def __init__(
        self, asked: EngineBuild, limits: Limits, directory: Path, progress: Progress
    ) -> None:
        self.asked, self.limits, self._progress = asked, limits, progress
        self._library = asked.open_library()
        self._timing = TimingCache()
        self._plans = directory / "engines"
        self._onnx = directory / "onnx"
        self.scratch = directory / "scratch"
        self.trees = limits.max_tree_nodes > 0
        self._draft_probs: Callable[[list[int]], np.ndarray | None] = lambda _: None
        self._plans.mkdir()
        self.scratch.mkdir()

    def plan(self, name: str, path: Path, profiles: tuple[Profile, ...]) -> None:
        self._progress(f"building the engine of {name}")
        made = build_plan(self._library, path, profiles, self.asked.options, self._timing)
        (self._plans / f"{name}.plan").write_bytes(made.data)

    def draft(
        self, draft: DraftPlan | None, target: EngineGraph
    ) -> tuple[WrittenDraft | None, Callable[[list[int]], list[Gate]]]:
        if draft is None:
            return None, lambda _: []
        target_vocab = target.vocab_size
        on_engines = self.asked.draft_backend != "onnxruntime"
        if on_engines and isinstance(draft, ModelDraftPlan):
            if self.trees:
                self._tree_round(target.cache)
            return self._model_draft(draft, target_vocab)
        if on_engines and isinstance(draft, HeadPlan):
            return self._head(draft, target)
        self._progress(f"writing the draft, {draft.name}")
        self._onnx.mkdir()
        store = WeightStore(directory=self._onnx)
        written = draft.write(self._onnx, store, target_vocab=target_vocab, trees=self.trees)
        if not any(self._onnx.iterdir()):
            self._onnx.rmdir()
        if draft.taps and target.exact is None:
            return written, lambda _: []  # nothing to hold a head's states against
        return written, lambda tokens: written.gates(tokens, partial(exact_states, target))

    def _model_draft(
        self, draft: ModelDraftPlan, target_vocab: int
    ) -> tuple[WrittenDraft, Callable[[list[int]], list[Gate]]]:
        precision, model = self.asked.draft_precision, draft.draft
        self._progress(f"writing the draft, {model.checkpoint.name}, {precision.name}")
        graph = write_draft_graph(
            model, precision, draft.context, self.scratch, target_vocab=target_vocab
        )
        tail = write_draft_tail(model, self.scratch, target_vocab=target_vocab)
        vocabulary = DraftVocabulary(target_size=target_vocab, size=graph.vocab_size, d2t=model.d2t)
        card = model_card(model.checkpoint, graph, precision)
        size = vocabulary.q_size(QOver.DRAFT)
        self._draft_probs = lambda tokens: exact_probs(graph, size, tokens)

        branch = self._branch(draft, vocabulary) if self.trees else None

        def gates(tokens: list[int]) -> list[Gate]:
            found = draft_gates(model, graph, precision, vocabulary, tokens)
            self.plan("draft", graph.path, draft_profiles(self.limits, draft.context))
            self.plan("tail", tail, tail_profiles(self.limits))
            if branch is not None:
                given = BranchInputs(tokens=tokens, spec=branch_graph(branch.exact_cache))
                found += branch_gates(branch, self._draft_probs(tokens), vocabulary, given)
                self.plan("branch", branch.path, branch_profiles(self.limits, draft.context))
            return found

        written = WrittenDraft(
            card=ModelDraft(card=card),
            vocab_size=vocabulary.q_size(QOver.DRAFT),
            d2t=model.d2t,
            gates=lambda tokens, _: gates(list(tokens)),
        )
        return written, gates

    def _head(
        self, draft: HeadPlan, target: EngineGraph
    ) -> tuple[WrittenDraft, Callable[[list[int]], list[Gate]]]:
        """What reads the target's states, beside it on the device."""
        precision = self.asked.draft_precision
        self._progress(f"writing the draft, {head_name(draft)}, {precision.name}")
        made = write_engine_head(
            draft, precision, self.limits, self.scratch, target_vocab=target.vocab_size
        )
        states = partial(exact_states, target)
        if target.exact is not None:
            self._draft_probs = lambda tokens: made.law(tokens, states)

        def gates(tokens: list[int]) -> list[Gate]:
            found = [skipped("draft parity", draft.target)]
            if target.exact is not None:
                found = made.gates(tokens, states)
            for order in made.orders:
                self.plan(order.name, order.path, order.profiles)
            return found

        return made.written, gates

    def _branch(self, draft: ModelDraftPlan, vocabulary: DraftVocabulary) -> EngineGraph:
        """Its weights are the draft's, in a plan of their own."""
        self._progress(f"writing what makes trees of {draft.draft.checkpoint.name}")
        precision = self.asked.draft_precision
        return write_branch_graph(
            draft.draft, precision, draft.context, self.scratch, vocabulary=vocabulary
        )

    def _tree_round(self, cache: CacheSpec) -> None:
        """What a round with a tree needs besides, to be one launch."""
        profiles = tree_round_profiles(self.limits)
        for name, path in write_tree_round(cache, self.scratch).items():
            self.plan(name, path, profiles)

    def accept(self, vocab: int, draft: WrittenDraft | None) -> None:
        d2t = draft.d2t if draft else None
        store = WeightStore(directory=self.scratch)
        write_accept(vocab, draft.vocab_size if draft else None, d2t, store)
        self.plan("accept", self.scratch / "accept.onnx", accept_profiles(self.limits))
        if d2t is not None:
            np.save(self._plans.parent / "d2t.npy", d2t.astype(np.int64))

    def record(self, target: EngineGraph, draft: WrittenDraft | None, tokens: list[int]) -> None:
        """What the machine with the GPU is held against, where it was computed here."""
        logits = exact_logits(target, tokens)
        if logits is None:
            return
        record(
            self._plans.parent,
            self.scratch / "accept.onnx",
            tokens=tokens,
            logits=logits,
            draft_probs=self._draft_probs(tokens),
            d2t=draft.d2t if draft else None,
            draft_vocab=(draft.vocab_size if draft else None) or target.vocab_size,
            max_draft_tokens=self.limits.max_draft_tokens,
        )

    def card(self) -> EngineCard:
        return EngineCard(
            package=self.asked.backend,
            version=self._library.version,
            compute_capabilities=self.asked.options.compute_capabilities,
            draft_backend=self.asked.draft_backend,
        )

    def finish(self) -> None:
        shutil.rmtree(self.scratch)
