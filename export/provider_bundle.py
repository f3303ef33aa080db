"""A bundle of graphs for ONNX Runtime's CUDA provider, built and checked on a machine without it.

The same checks as any build's run on the CPU, in f32 and as typed in fp16; that the provider has a
kernel for every node is read off a table (engines.onnxruntime_cuda.kernels), and said again by the
provider itself, which leaves nothing to the CPU, when the bundle is opened.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.external_data import WeightStore
from runtime.errors import BuildError
from runtime.manifest import Gate, Limits, ModelDraft
from runtime.provider_contract import PROVIDER_BACKEND

from .accept_graph import accept_model
from .checkpoint import Checkpoint
from .draft_plan import DraftPlan, WrittenDraft, no_states
from .draft_tail import tail_model
from .draft_vocabulary import DraftVocabulary, QOver
from .engine_gates import exact_logits, target_gates
from .engine_graphs import EngineGraph
from .model_card import model_card
from .model_draft import ModelDraftPlan
from .ngram_draft import NgramDraftPlan
from .oracle import record
from .provider_graphs import (
    ProviderGateGraph,
    draft_gates,
    exact_probs,
    write_decoder,
    write_sampling,
)
from .provider_precision import ProviderPrecision

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ProviderBuild:
    """What is asked of the graphs of one bundle."""

    precision: ProviderPrecision
    draft_precision: ProviderPrecision


@dataclass(frozen=True, kw_only=True)
class WrittenGraphs:
    target: EngineGraph
    draft: WrittenDraft | None
    gates: Callable[[list[int]], tuple[Gate, ...]]


def refuse_drafter(draft: DraftPlan | None, limits: Limits) -> None:
    """Raises BuildError for a drafter that isn't carried to the provider yet."""
    if limits.max_tree_nodes:
        raise BuildError(
            f"--max-tree-nodes: received {limits.max_tree_nodes} with --backend "
            f"{PROVIDER_BACKEND}. Expected 0: its graphs verify chains; trees need --backend "
            "onnxruntime."
        )
    if not (draft is None or isinstance(draft, NgramDraftPlan | ModelDraftPlan)):
        raise BuildError(
            f"--draft: received {draft.name} with --backend {PROVIDER_BACKEND}. Expected a draft "
            "model, ngram or none: others run on --backend onnxruntime alone so far."
        )


def write_provider_graphs(
    asked: ProviderBuild,
    target: Checkpoint,
    draft: DraftPlan | None,
    limits: Limits,
    directory: Path,
    progress: Progress,
) -> WrittenGraphs:
    """Fill `directory`/onnx. Raises BuildError."""
    writer = _Writer(asked, limits, directory, progress)
    graph = writer.target(target)
    written = writer.draft(draft, graph.vocab_size)
    writer.accept(graph.vocab_size, written)

    def checked(tokens: list[int]) -> tuple[Gate, ...]:
        k = max(1, min(limits.max_draft_tokens, len(tokens) // 3))
        progress("checking the graphs against the checkpoints")
        found = target_gates(target, graph, asked.precision, tokens, k, ProviderGateGraph)
        found += written.gates(tokens, no_states) if written else []
        writer.record(graph, written, tokens)
        shutil.rmtree(writer.scratch)
        return tuple(found)

    return WrittenGraphs(target=graph, draft=written, gates=checked)


class _Writer:
    """Graphs go to onnx/, exact twins to a scratch directory that goes in the end."""

    def __init__(
        self, asked: ProviderBuild, limits: Limits, directory: Path, progress: Progress
    ) -> None:
        self._asked, self._limits, self._progress = asked, limits, progress
        self._directory, self._onnx = directory, directory / "onnx"
        self.scratch = directory / "scratch"
        self._drafter: EngineGraph | None = None
        self._onnx.mkdir()
        self.scratch.mkdir()
        self._store = WeightStore(directory=self._onnx)

    def target(self, checkpoint: Checkpoint) -> EngineGraph:
        precision, vocab = self._asked.precision, checkpoint.config.vocab_size
        self._progress(f"tracing and writing the target, {checkpoint.name}, {precision.name}")
        return write_decoder(
            "target", checkpoint, precision, self._limits.max_context, self._store, self.scratch,
            vocab_size=vocab,
        )  # fmt: skip

    def draft(self, draft: DraftPlan | None, target_vocab: int) -> WrittenDraft | None:
        if draft is None:
            return None
        if not isinstance(draft, ModelDraftPlan):
            return draft.write(self._onnx, self._store, target_vocab=target_vocab, trees=False)
        return self._model(draft, target_vocab)

    def _model(self, plan: ModelDraftPlan, target_vocab: int) -> WrittenDraft:
        precision, model = self._asked.draft_precision, plan.draft
        self._progress(f"writing the draft, {model.checkpoint.name}, {precision.name}")
        graph = self._drafter = write_decoder(
            "draft", model.checkpoint, precision, plan.context, self._store, self.scratch,
            vocab_size=model.vocab_size,
            head_rows=model.vocab_size if model.d2t is not None else None,
        )  # fmt: skip
        tail = tail_model(model.vocab_size, model.d2t, vocab_size=target_vocab)
        write_sampling("tail", tail, {"batch": 1, "drafted": 1}, self._store)
        vocabulary = DraftVocabulary(target_size=target_vocab, size=graph.vocab_size, d2t=model.d2t)
        return WrittenDraft(
            card=ModelDraft(card=model_card(model.checkpoint, graph, precision)),
            vocab_size=vocabulary.q_size(QOver.DRAFT),
            d2t=model.d2t,
            gates=lambda tokens, _: draft_gates(model, graph, precision, tokens),
        )

    def accept(self, vocab: int, draft: WrittenDraft | None) -> None:
        d2t = draft.d2t if draft else None
        model = accept_model(vocab, d2t, draft_vocab_size=draft.vocab_size if draft else None)
        k = max(1, self._limits.max_draft_tokens)
        sizes = {"batch": 1, "k": k, "k_plus_1": k + 1, "num_q_rows": k}
        write_sampling("accept", model, sizes, self._store)
        if d2t is not None:
            np.save(self._directory / "d2t.npy", d2t.astype(np.int64))

    def record(self, target: EngineGraph, draft: WrittenDraft | None, tokens: list[int]) -> None:
        """What the machine with the GPU is held against, where it was computed here."""
        logits = exact_logits(target, tokens, ProviderGateGraph)
        if logits is None:
            return
        record(
            self._directory,
            self._onnx / "accept.onnx",
            tokens=tokens,
            logits=logits,
            draft_probs=exact_probs(self._drafter, tokens) if self._drafter else None,
            d2t=draft.d2t if draft else None,
            draft_vocab=(draft.vocab_size if draft else None) or target.vocab_size,
            max_draft_tokens=self._limits.max_draft_tokens,
        )
