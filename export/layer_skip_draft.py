"""The target as its own draft on the way into a bundle: no weight is written a second time.

The written target is opened again, its layers made skippable, and only its graph's file replaced.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from engines.external_data import WeightStore, save
from engines.onnxruntime.lowering import make_skippable
from runtime.contract import SKIP_LAYERS
from runtime.errors import BuildError, DraftDoesNotPay
from runtime.layer_runs import as_text
from runtime.manifest import Gate, LayerSkipDraft

from . import gates
from .checkpoint import Checkpoint
from .draft_plan import PlanDefaults, WrittenDraft
from .draft_tail import tail_model
from .gate_graph import GateGraph
from .graphs import rounded_weights
from .layer_search import Score
from .layer_trial import choose_layers
from .precision import Precision
from .trace import cache_spec

logger = logging.getLogger(__name__)
SEARCH_SECONDS = 120.0
LEAST_SPEEDUP = 1.02  # less is what measurements can't tell from plain decoding


@dataclass(frozen=True, kw_only=True)
class LayerSkipPlan(PlanDefaults):
    target: Checkpoint
    precision: Precision
    context: int
    skipped: tuple[int, ...] | None  # None: search for `search_s`
    search_s: float
    max_draft_tokens: int

    @classmethod
    def of(
        cls,
        target: Checkpoint,
        *,
        precision: Precision,
        context: int,
        skip_layers: str | None,
        search_seconds: float | None,
        max_draft_tokens: int,
    ) -> Self:
        """Raises BuildError for layers that the target hasn't, or no time to search."""
        if skip_layers is not None and search_seconds is not None:
            raise BuildError(
                "--search-seconds: received it with --skip-layers. Expected one of them: layers "
                "that are given aren't searched for."
            )
        seconds = SEARCH_SECONDS if search_seconds is None else search_seconds
        if not 0 < seconds < float("inf"):
            raise BuildError(
                f"--search-seconds: received {seconds:g}. Expected more than 0, or --skip-layers."
            )
        count = target.config.num_hidden_layers
        if count < 2:
            raise BuildError(
                f"--draft layer-skip: received {target.name}, which has {count} layer. Expected at "
                "least 2; use --draft ngram or a draft model."
            )
        skipped = None if skip_layers is None else parse_layers(skip_layers, count)
        return cls(
            target=target,
            precision=precision,
            context=context,
            skipped=skipped,
            search_s=seconds,
            max_draft_tokens=max_draft_tokens,
        )

    @property
    def name(self) -> str:
        if self.skipped is None:
            return f"the target without some layers, searched for {self.search_s:g} s"
        return f"the target without layers {as_text(self.skipped)}"

    def write(
        self, onnx: Path, store: WeightStore, *, target_vocab: int, trees: bool
    ) -> WrittenDraft:
        save(tail_model(target_vocab), "tail", store)
        skipped, found = self.skipped, None
        if skipped is None:
            found = self._search(onnx, target_vocab)
            skipped = tuple(sorted(found.skipped))
        path = onnx / "target.onnx"
        model = make_skippable(ir.load(path), skipped)
        path.write_bytes(ir.to_proto(model).SerializeToString())
        rounded = rounded_weights(model, self.target)
        return WrittenDraft(
            card=LayerSkipDraft(skipped_layers=skipped),
            gates=lambda tokens, _: [
                self._parity(path, skipped, rounded, tokens),
                *([_outcome(found)] if found else []),
            ],
        )

    def _search(self, onnx: Path, target_vocab: int) -> Score:
        with tempfile.TemporaryDirectory() as directory:
            self.target.save_tokenizer(Path(directory))
            found = choose_layers(
                onnx,
                Path(directory),
                cache=cache_spec(self.target.config, self.context),
                vocab_size=target_vocab,
                special=self.target.special_tokens(),
                most=self.max_draft_tokens,
                seconds=self.search_s,
            )
        if found.speedup < LEAST_SPEEDUP:
            raise DraftDoesNotPay(
                f"--draft layer-skip: no set of layers pays for {self.target.name}. The best of "
                f"{self.search_s:g} s of search: {found}. Expected more than plain decoding gives; "
                "use --draft ngram or a draft model, or force a set with --skip-layers."
            )
        logger.info("layer-skip: %s", found)
        return found

    def _parity(
        self, path: Path, skipped: Sequence[int], rounded: frozenset[str], tokens: Sequence[int]
    ) -> Gate:
        """The kept layers alone, against the eager model without the others."""
        cache = cache_spec(self.target.config, self.context)
        vocab = self.target.config.vocab_size

        def run(graph: Path) -> Any:
            skipping = {SKIP_LAYERS: np.array(True)}
            return lambda: GateGraph(graph, cache, vocab, skipping).in_chunks(tokens)

        with gates.exact_arithmetic(path) as variant:
            return gates.parity(
                "draft parity",
                run(variant),
                run(path),
                lambda: without_layers(self.target.load_eager(), skipped),
                tokens,
                self.precision,
                rounded,
                needs_bytes=self.target.eager_bytes(),
            )


def _outcome(found: Score) -> Gate:
    """What the search measured, on texts that it did not choose by."""
    return Gate(
        name="layer-skip",
        status="passed",
        figures={
            "acceptance": found.acceptance,
            "draft_cost": found.draft_cost,
            "speedup": found.speedup,
            "k": found.k,
        },
    )


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """ "10-12,25" → (10, 11, 12, 25). Raises BuildError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise _unfit_layers(text, count)
        found.update(range(int(first), int(last or first) + 1))
        if dash and int(last) < int(first):
            raise _unfit_layers(text, count)
    if max(found) >= count or len(found) == count:
        raise _unfit_layers(text, count)
    return tuple(sorted(found))


def _unfit_layers(text: str, count: int) -> BuildError:
    return BuildError(
        f"--skip-layers: received {text!r}. Expected some of the target's layers, 0 to "
        f"{count - 1}, and not all of them, like 10-12,25."
    )


def without_layers(model: PreTrainedModel, skipped: Sequence[int]) -> PreTrainedModel:
    """The eager model, these layers handing on what they receive."""
    count = model.config.num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    for layer in skipped:
        stacks[0][layer].register_forward_hook(_hand_on, with_kwargs=True)
    return model


def _hand_on(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
