"""What a manifest says of the models in a bundle, and of the drafter, whatever its kind.

Every drafter's card answers the same questions: its `name` and `precision` for people, the `graphs`
that must be there, the `tree_graphs` besides where the bundle makes trees, the `model` that it has
weights of its own in, the `vocab_size` of q where that isn't the target's, and the `feature_width`
of the target's hidden states that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .contract import CacheSpec
from .errors import BundleError
from .layer_runs import as_text

MOST_NGRAM = 16


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """One model of the bundle, as built."""

    name: str  # directory name, hub id or file name it was built from
    model_type: str  # transformers' model_type
    revision: str  # hub commit, or "" for a local checkpoint
    sha256: str  # of the checkpoint's configuration and weights
    parameters: int
    precision: str  # fp32 | int8 | int4
    vocab_size: int  # rows of the output head; a trimmed draft has fewer than its target
    cache: CacheSpec


class _Weightless:
    """What a drafter without weights of its own says of them."""

    precision: ClassVar[str] = "none"
    graphs: ClassVar[tuple[str, ...]] = ()
    tree_graphs: ClassVar[tuple[str, ...] | None] = None
    model: ClassVar[ModelCard | None] = None
    vocab_size: ClassVar[int | None] = None
    feature_width: ClassVar[int] = 0


class _OfModel:
    """What a drafter with weights of its own says of them."""

    card: ModelCard
    tree_graphs: ClassVar[tuple[str, ...] | None] = None  # None: it makes chains only

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def precision(self) -> str:
        return self.card.precision

    @property
    def model(self) -> ModelCard | None:
        return self.card


@dataclass(frozen=True, kw_only=True)
class ModelDraft(_OfModel):
    """A model: `onnx/draft.onnx`, and `d2t.npy` where its vocabulary is trimmed."""

    kind: Literal["model"] = "model"
    card: ModelCard

    graphs: ClassVar[tuple[str, ...]] = ("draft",)
    tree_graphs: ClassVar[tuple[str, ...] | None] = ("branch",)
    feature_width: ClassVar[int] = 0

    @property
    def vocab_size(self) -> int | None:
        return self.card.vocab_size


@dataclass(frozen=True, kw_only=True)
class NgramDraft(_Weightless):
    """Lookup of the text's last min_ngram to max_ngram tokens in itself; nothing on disk."""

    kind: Literal["ngram"] = "ngram"
    min_ngram: int
    max_ngram: int

    tree_graphs: ClassVar[tuple[str, ...] | None] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram <= MOST_NGRAM:
            received = f"n-grams of {self.min_ngram} to {self.max_ngram} tokens"
            raise unfit("draft", received, f"1 ≤ min_ngram ≤ max_ngram ≤ {MOST_NGRAM}")

    @property
    def name(self) -> str:
        return f"n-grams of {self.min_ngram} to {self.max_ngram} tokens"


@dataclass(frozen=True, kw_only=True)
class LayerSkipDraft(_Weightless):
    """The target without these layers: its own graph and cache, and `onnx/tail.onnx` to sample."""

    kind: Literal["layer-skip"] = "layer-skip"
    skipped_layers: tuple[int, ...]  # ascending

    precision: ClassVar[str] = "the target's"
    graphs: ClassVar[tuple[str, ...]] = ("tail",)

    def __post_init__(self) -> None:
        layers = self.skipped_layers
        if not layers or min(layers) < 0 or list(layers) != sorted(set(layers)):
            raise unfit("draft.skipped_layers", list(layers), "ascending layers, at least one")

    @property
    def name(self) -> str:
        return f"the target without layers {as_text(self.skipped_layers)}"


@dataclass(frozen=True, kw_only=True)
class EagleDraft(_OfModel):
    """A head on the target's hidden states, `onnx/draft.onnx`, with a cache of one layer.

    Version 3 joins the states at `taps` by `onnx/fuse.onnx`; version 1 (EAGLE-1 and -2) starts from
    the state behind the target's last norm.
    """

    kind: Literal["eagle"] = "eagle"
    version: int
    card: ModelCard
    taps: tuple[int, ...]  # layers whose input it reads; the number of layers: behind the last norm
    feature_width: int  # of the target's `features`
    state_width: int

    tree_graphs: ClassVar[tuple[str, ...] | None] = ("branch",)

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise unfit("draft.version", self.version, "1 or 3")

    @property
    def graphs(self) -> tuple[str, ...]:
        return ("draft", "fuse") if self.version == 3 else ("draft",)

    @property
    def vocab_size(self) -> int | None:
        return self.card.vocab_size


@dataclass(frozen=True, kw_only=True)
class MedusaDraft:
    """Heads on the target's state behind its last norm: `onnx/heads.onnx`, `onnx/tail.onnx`."""

    kind: Literal["medusa"] = "medusa"
    name: str
    revision: str
    sha256: str
    parameters: int
    precision: str
    num_heads: int  # as built: at most as many as there are
    vocab_size: int
    feature_width: int

    graphs: ClassVar[tuple[str, ...]] = ("heads", "tail")
    tree_graphs: ClassVar[tuple[str, ...] | None] = ("rank",)
    model: ClassVar[ModelCard | None] = None

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise unfit("draft.num_heads", self.num_heads, "at least 1")


@dataclass(frozen=True, kw_only=True)
class RetokenizedDraft(_OfModel):
    """A draft model with tokens of its own, whose text is put into the target's; q is one-hot."""

    kind: Literal["retokenized"] = "retokenized"
    card: ModelCard

    graphs: ClassVar[tuple[str, ...]] = ("draft",)
    feature_width: ClassVar[int] = 0
    vocab_size: ClassVar[int | None] = None

    @property
    def name(self) -> str:
        return f"{self.card.name}, in its own tokens"


@dataclass(frozen=True, kw_only=True)
class NgramPlusDraft:
    """Lookup where it finds something, `other` elsewhere; q is over the target's vocabulary."""

    kind: Literal["ngram+"] = "ngram+"
    ngram: NgramDraft
    other: ModelDraft | EagleDraft | MedusaDraft | RetokenizedDraft

    vocab_size: ClassVar[int | None] = None
    tree_graphs: ClassVar[tuple[str, ...] | None] = None

    @property
    def name(self) -> str:
        return f"{self.ngram.name}, else {self.other.name}"

    @property
    def precision(self) -> str:
        return self.other.precision

    @property
    def graphs(self) -> tuple[str, ...]:
        return self.other.graphs

    @property
    def model(self) -> ModelCard | None:
        return self.other.model

    @property
    def feature_width(self) -> int:
        return self.other.feature_width


#: told apart by `kind`; `drafters.py` loads each
DraftCard = (
    ModelDraft
    | NgramDraft
    | LayerSkipDraft
    | EagleDraft
    | MedusaDraft
    | RetokenizedDraft
    | NgramPlusDraft
)


def unfit(where: str, raw: Any, expected: str) -> BundleError:
    """The error of a manifest's value that is not what it should be."""
    return BundleError(
        f"manifest.json: {where}: received {raw!r}. Expected {expected}; rebuild the bundle."
    )
