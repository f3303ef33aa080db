"""Medusa heads on their way into a bundle: one graph for all heads, one tail to sample a draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engines.external_data import WeightStore, save
from engines.onnxruntime.lowering import lower
from runtime.contract import heads_graph
from runtime.errors import BuildError, GateFailed
from runtime.executor import EngineOptions, Executor
from runtime.manifest import Gate, MedusaDraft

from . import gates
from .branch_tail import rank_model
from .checkpoint import Checkpoint
from .draft_plan import WrittenDraft
from .draft_tail import tail_model
from .draft_vocabulary import DraftVocabulary, QOver
from .eagle_graph import rounded_names
from .medusa_heads import MedusaHeads, open_medusa
from .medusa_module import MedusaModule
from .portable import bind_weights, simplify
from .precision import Precision
from .quiet import quiet
from .tolerances import EAGER
from .torch_onnx import to_onnx
from .trace import cleaned

OUTPUT = "lm_head.weight"  # the target's, where the heads have none


@dataclass(frozen=True, kw_only=True)
class MedusaDraftPlan:
    """`count`: heads that are built, at most as many as there are."""

    heads: MedusaHeads
    target: Checkpoint
    precision: Precision
    context: int  # the target's
    count: int
    q_over: QOver

    @classmethod
    def open(
        cls,
        source: str,
        target: Checkpoint,
        *,
        target_context: int,
        precision: Precision,
        max_draft_tokens: int,
        q_over: QOver = QOver.DRAFT,
    ) -> Self:
        """Raises CheckpointError where they don't fit the target."""
        heads = open_medusa(source, target)
        if heads.borrows_head and target.find(OUTPUT) is None:
            raise BuildError(
                f"--draft {heads.name}: received heads without output matrices, and {target.name} "
                f"has no {OUTPUT} to lend. Expected one of them; use heads of version 1."
            )
        count = min(heads.num_heads, max(1, max_draft_tokens))
        return cls(
            heads=heads,
            target=target,
            precision=precision,
            context=target_context,
            count=count,
            q_over=q_over,
        )

    @property
    def name(self) -> str:
        return f"{self.heads.name}, {self.count} heads, {self.precision.name}"

    @property
    def most_drafts(self) -> int | None:
        return self.count

    @property
    def taps(self) -> tuple[int, ...]:
        """The state behind the last norm."""
        return (self.target.config.num_hidden_layers,)

    @property
    def makes_trees(self) -> bool:
        return True

    def write(
        self, onnx: Path, store: WeightStore, *, target_vocab: int, trees: bool
    ) -> WrittenDraft:
        model = self.portable()
        lower(model, self.precision.quantizer())
        rounded = rounded_names(model)
        save(model, "heads", store, share=self._shared)
        size, d2t = self.heads.vocab_size, self.ascending()
        tail = tail_model(size, d2t, vocab_size=target_vocab, q_over=self.q_over)
        save(tail, "tail", store)
        if trees:
            save(rank_model(size, d2t, target_vocab), "rank", store)
        vocabulary = DraftVocabulary(target_size=target_vocab, size=size, d2t=d2t)
        return WrittenDraft(
            card=self.card(self.precision),
            vocab_size=vocabulary.q_size(self.q_over),
            d2t=d2t if self.q_over is QOver.DRAFT else None,
            gates=lambda tokens, states: [self._parity(onnx, rounded, states(tokens))],
        )

    def portable(self) -> ir.Model:
        """All heads as one graph, in f32, with its weights to come."""
        model = simplify(self._traced())
        bind_weights(model, self.load)
        return model

    def _traced(self) -> ir.Model:
        axes = {0: torch.export.Dim("batch", min=1, max=1024)}
        axes |= {1: torch.export.Dim("query_len", min=1, max=1 << 20)}
        with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            program = to_onnx(
                MedusaModule(self.heads, self.count).eval(),
                (torch.zeros(2, 4, self.heads.hidden_size),),
                (axes,),
                inputs=["features"],
                outputs=["head_logits"],
                name=self.heads.name,
            )
        return cleaned(program.model)

    def ascending(self) -> np.ndarray | None:
        """d2t of the rows by ascending target id, as a bundle wants them."""
        if self.heads.d2t is None:
            return None
        ids = np.sort(np.arange(self.heads.vocab_size) + self.heads.d2t)
        return ids - np.arange(len(ids))

    def load(self, name: str) -> np.ndarray:
        if name == OUTPUT:
            return self.target.load(str(self.target.find(OUTPUT)))
        value = self.heads.load(name)
        if self.heads.d2t is None or not name.endswith("lm_head.weight"):
            return value
        return value[np.argsort(np.arange(self.heads.vocab_size) + self.heads.d2t)]

    def _shared(self, name: str) -> str | None:
        """The key of a tied output matrix, as the target's own graph has it."""
        base, _, part = name.partition(".weight")
        embedding, output = self.target.find("model.embed_tokens.weight"), self.target.find(OUTPUT)
        if f"{base}.weight" != OUTPUT or embedding is None or output is None:
            return None
        home = self.target.stored(embedding)
        if self.target.stored(output) != home:
            return None
        return f"{home}:{self.precision.name}:{part.removesuffix('.table')}"

    def eager_bytes(self) -> int:
        return 4 * sum(int(np.prod(shape)) for shape in self.heads.shapes().values())

    def card(self, precision: gates.Rounding) -> MedusaDraft:
        """What the manifest says of the heads, whose weights are as built."""
        heads = self.heads
        kept = tuple(f"heads.{i}." for i in range(self.count))
        sizes = (np.prod(s) for name, s in heads.shapes().items() if name.startswith(kept))
        return MedusaDraft(
            name=heads.name,
            revision=heads.revision,
            sha256=heads.sha256,
            parameters=int(sum(sizes)),
            precision=precision.name,
            num_heads=self.count,
            vocab_size=heads.vocab_size,
            feature_width=heads.hidden_size,
        )

    def _parity(self, onnx: Path, rounded: frozenset[str], rows: np.ndarray) -> Gate:
        states = rows[:, None]  # a row a batch
        with gates.exact_arithmetic(onnx / "heads.onnx") as variant:
            graph = heads_rows(self, variant, states, EngineOptions(spin=False))
        return heads_parity(self, self.precision, rounded, graph, states)


def heads_parity(
    draft: MedusaDraftPlan,
    precision: gates.Rounding,
    rounded: frozenset[str],
    graph: np.ndarray,  # [n, heads, D] of the written graph in f32 arithmetic, on `states`
    states: np.ndarray,  # [n, 1, H]
) -> Gate:
    """All heads on the target's states, against the eager ones. Raises GateFailed."""
    error = gates.relative_error(graph, _eager_rows(draft, precision, rounded, states))
    figures: gates.Figures = {"relative_error": error, "limit": EAGER, "rows": len(states)}
    if not error <= EAGER:
        raise GateFailed(
            f"gate draft parity: received a relative error of {error:.3g} against the eager "
            f"heads with the same weights. Expected at most {EAGER:g}; these heads aren't "
            "exported rightly: please report them with their config.json."
        )
    return Gate(name="draft parity", status="passed", figures=figures)


def heads_rows(
    draft: MedusaDraftPlan, path: Path, states: np.ndarray, options: EngineOptions
) -> np.ndarray:
    """Of the graph at `path`: [n, heads, D]."""
    logits = np.zeros((len(states), draft.count, draft.heads.vocab_size), np.float32)
    heads = Executor.load(path, heads_graph(), options)
    heads.bind({"features": states}, {"head_logits": logits}).run()
    return logits


@torch.inference_mode()
def _eager_rows(
    draft: MedusaDraftPlan, precision: gates.Rounding, rounded: frozenset[str], states: np.ndarray
) -> np.ndarray:
    module = MedusaModule(draft.heads, draft.count)
    for name, parameter in module.named_parameters():
        value = draft.load(name)
        value = precision.rounded(value, name) if name in rounded else value
        parameter.copy_(torch.from_numpy(value))
    return np.asarray(module(torch.from_numpy(states)).numpy())
