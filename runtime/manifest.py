"""The manifest: what a bundle is, what it may be asked for, and what its gates measured.

Frozen values that check themselves; JSON with an unknown or a missing key is refused, so that a
bundle of another schema is never read halfway.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from .cards import DraftCard as DraftCard
from .cards import EagleDraft as EagleDraft
from .cards import LayerSkipDraft as LayerSkipDraft
from .cards import MedusaDraft as MedusaDraft
from .cards import ModelCard as ModelCard
from .cards import ModelDraft as ModelDraft
from .cards import NgramDraft as NgramDraft
from .cards import NgramPlusDraft as NgramPlusDraft
from .cards import RetokenizedDraft as RetokenizedDraft
from .cards import unfit
from .contract import MOST_TREE_NODES
from .errors import BundleError

SCHEMA = 4
ENGINE_LIBRARIES = ("tensorrt", "tensorrt-rtx")  # backends whose graphs are plans
DRAFT_TOKENIZER = "draft_tokenizer.json"  # of a draft that has tokens of its own


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the bundle was built for; the flags that change them are in the error messages."""

    max_batch: int
    max_context: int
    max_draft_tokens: int  # largest k; 0 where the bundle has no draft
    max_tree_nodes: int = 0  # drafts of the largest tree; 0 where the bundle makes chains only

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_context", 2), ("max_draft_tokens", 0)):
            value = getattr(self, name)
            if not least <= value < 2**31:
                raise unfit(f"limits.{name}", value, f"{least} to 2**31 - 1")
        if not 0 <= self.max_tree_nodes <= MOST_TREE_NODES:
            raise unfit("limits.max_tree_nodes", self.max_tree_nodes, f"0 to {MOST_TREE_NODES}")
        if self.max_draft_tokens >= self.max_context:
            received = f"{self.max_draft_tokens} draft tokens in {self.max_context} rows"
            raise unfit("limits", received, "fewer draft tokens than max_context")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One check that the build made: figures are measured, limits are what they were held to."""

    name: str
    status: str  # passed | skipped ("failed" never leaves a bundle behind)
    reason: str = ""  # why it was skipped
    figures: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EngineCard:
    """What the plans in engines/ were built by and for; a plan runs on nothing else."""

    package: str  # tensorrt | tensorrt-rtx
    version: str
    compute_capabilities: tuple[int, ...]  # such as 80, 89; empty: all that the library builds for
    draft_backend: str  # where the draft's graph runs: the library, or onnxruntime


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    schema: int
    versions: dict[str, str]  # outrider, onnxruntime, torch, transformers, …
    backend: str  # onnxruntime | onnxruntime-cuda | tensorrt | tensorrt-rtx
    target: ModelCard
    draft: DraftCard | None
    limits: Limits
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer_sha256: str
    gates: tuple[Gate, ...]
    files: dict[str, FileRecord]  # relative POSIX path → record; all files but the manifest
    engines: EngineCard | None = None  # of a TensorRT backend

    @property
    def draft_model(self) -> ModelCard | None:
        """What the drafter has weights of its own in, if anything."""
        return self.draft.model if self.draft else None

    @property
    def retokenized(self) -> bool:
        """Whether the draft model has tokens of its own."""
        draft = self.draft.other if isinstance(self.draft, NgramPlusDraft) else self.draft
        return isinstance(draft, RetokenizedDraft)

    @property
    def feature_width(self) -> int:
        """Of the target's hidden states that the drafter reads; 0: none."""
        return self.draft.feature_width if self.draft else 0

    @property
    def draft_vocab_size(self) -> int:
        """Width of q: the drafter's own vocabulary, else the target's."""
        size = self.draft.vocab_size if self.draft else None
        return self.target.vocab_size if size is None else size

    @property
    def _drafting(self) -> DraftCard | None:
        """What drafts where a lookup finds nothing, or no lookup is."""
        return self.draft.other if isinstance(self.draft, NgramPlusDraft) else self.draft

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise BundleError(f"manifest.json: not JSON ({error}); rebuild the bundle.") from error
        if isinstance(raw, dict) and raw.get("schema") != SCHEMA:
            raise BundleError(
                f"manifest.json: received schema {raw.get('schema')!r}. Expected {SCHEMA}; rebuild "
                "the bundle with this version, or install the version that built it."
            )
        return typing.cast(Manifest, _read(cls, raw, "manifest"))


def _read(kind: Any, raw: Any, where: str) -> Any:
    """Read `raw` as the annotated type `kind`, naming the key that does not fit."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), raw, where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(args, raw, where)
    if origin is Literal and raw in args:
        return raw
    if origin is tuple and isinstance(raw, list):
        return tuple(_read(args[0], item, f"{where}[{i}]") for i, item in enumerate(raw))
    if origin is dict and isinstance(raw, dict):
        return {key: _read(args[1], item, f"{where}.{key}") for key, item in raw.items()}
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        return raw
    if isinstance(kind, type) and type(raw) is kind:
        return raw
    raise unfit(where, raw, str(kind))


def _read_union(options: tuple[Any, ...], raw: Any, where: str) -> Any:
    if raw is None and types.NoneType in options:
        return None
    options = tuple(option for option in options if option is not types.NoneType)
    if len(options) == 1:
        return _read(options[0], raw, where)
    if all(map(dataclasses.is_dataclass, options)):
        return _read(_named(options, raw, where), raw, where)
    for option in options:
        try:
            return _read(option, raw, where)
        except BundleError as error:
            last = error
    raise last


def _named(options: tuple[Any, ...], raw: Any, where: str) -> Any:
    """The dataclass that `raw` names by its `kind`."""
    kind = raw.get("kind") if isinstance(raw, dict) else raw
    found = [option for option in options if option.kind == kind]
    if not found:
        known = ", ".join(option.kind for option in options)
        raise BundleError(
            f"manifest.json: {where}.kind: received {kind!r}. Expected one of {known}; rebuild the "
            "bundle with this version, or install the version that built it."
        )
    return found[0]


def _read_dataclass(kind: type, raw: Any, where: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(raw, dict):
        raise unfit(where, raw, "an object")
    missing, unknown = sorted(set(fields) - set(raw)), sorted(set(raw) - set(fields))
    if missing or unknown:
        raise BundleError(
            f"manifest.json: {where}: missing keys {missing}, unknown keys {unknown}; the bundle "
            "was built by another version: rebuild it."
        )
    hints = typing.get_type_hints(kind)
    return kind(**{name: _read(hints[name], raw[name], f"{where}.{name}") for name in fields})
