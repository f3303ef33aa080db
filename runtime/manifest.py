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

from .contract import CacheSpec
from .errors import BundleError

SCHEMA = 2
MOST_NGRAM = 16
DRAFT_TOKENIZER = "draft_tokenizer.json"  # of a draft that has tokens of its own


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the bundle was built for; the flags that change them are in the error messages."""

    max_batch: int
    max_context: int
    max_draft_tokens: int  # largest k; 0 where the bundle has no draft

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_context", 2), ("max_draft_tokens", 0)):
            value = getattr(self, name)
            if not least <= value < 2**31:
                raise _unfit(f"limits.{name}", value, f"{least} to 2**31 - 1")
        if self.max_draft_tokens >= self.max_context:
            received = f"{self.max_draft_tokens} draft tokens in {self.max_context} rows"
            raise _unfit("limits", received, "fewer draft tokens than max_context")


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


@dataclass(frozen=True, kw_only=True)
class ModelDraft:
    """A model: `onnx/draft.onnx`, and `d2t.npy` where its vocabulary is trimmed."""

    kind: Literal["model"] = "model"
    card: ModelCard

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def precision(self) -> str:
        return self.card.precision


@dataclass(frozen=True, kw_only=True)
class NgramDraft:
    """Lookup of the text's last min_ngram to max_ngram tokens in itself; nothing on disk."""

    kind: Literal["ngram"] = "ngram"
    min_ngram: int
    max_ngram: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram <= MOST_NGRAM:
            received = f"n-grams of {self.min_ngram} to {self.max_ngram} tokens"
            raise _unfit("draft", received, f"1 ≤ min_ngram ≤ max_ngram ≤ {MOST_NGRAM}")

    @property
    def name(self) -> str:
        return f"n-grams of {self.min_ngram} to {self.max_ngram} tokens"

    @property
    def precision(self) -> str:
        return "none"


@dataclass(frozen=True, kw_only=True)
class RetokenizedDraft:
    """A model of another tokenizer, `draft_tokenizer.json`; it proposes the target's tokens."""

    kind: Literal["retokenized"] = "retokenized"
    card: ModelCard

    @property
    def name(self) -> str:
        return f"{self.card.name}, in its own tokens"

    @property
    def precision(self) -> str:
        return self.card.precision


@dataclass(frozen=True, kw_only=True)
class NgramPlusDraft:
    """Lookup where it finds something, `other` elsewhere; q is over the target's vocabulary."""

    kind: Literal["ngram+"] = "ngram+"
    ngram: NgramDraft
    other: ModelDraft | RetokenizedDraft

    @property
    def name(self) -> str:
        return f"{self.ngram.name}, else {self.other.name}"

    @property
    def precision(self) -> str:
        return self.other.precision


#: told apart by `kind`; `drafters.py` loads each
DraftCard = ModelDraft | NgramDraft | RetokenizedDraft | NgramPlusDraft


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One check that the build made: figures are measured, limits are what they were held to."""

    name: str
    status: str  # passed | skipped ("failed" never leaves a bundle behind)
    reason: str = ""  # why it was skipped
    figures: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    schema: int
    versions: dict[str, str]  # outrider, onnxruntime, torch, transformers, …
    backend: str  # onnxruntime
    target: ModelCard
    draft: DraftCard | None
    limits: Limits
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer_sha256: str
    gates: tuple[Gate, ...]
    files: dict[str, FileRecord]  # relative POSIX path → record; all files but the manifest

    @property
    def draft_model(self) -> ModelCard | None:
        """The draft's model, where the draft is one or has one."""
        draft = self._drafting
        return draft.card if isinstance(draft, ModelDraft | RetokenizedDraft) else None

    @property
    def retokenized(self) -> bool:
        """Whether the draft model has tokens of its own."""
        return isinstance(self._drafting, RetokenizedDraft)

    @property
    def draft_vocab_size(self) -> int:
        """Width of q: the vocabulary of a draft that is a model, else the target's."""
        model = self.draft.card if isinstance(self.draft, ModelDraft) else self.target
        return model.vocab_size

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
    raise _unfit(where, raw, str(kind))


def _read_union(options: tuple[Any, ...], raw: Any, where: str) -> Any:
    if raw is None and types.NoneType in options:
        return None
    options = tuple(option for option in options if option is not types.NoneType)
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
        raise _unfit(where, raw, "an object")
    missing, unknown = sorted(set(fields) - set(raw)), sorted(set(raw) - set(fields))
    if missing or unknown:
        raise BundleError(
            f"manifest.json: {where}: missing keys {missing}, unknown keys {unknown}; the bundle "
            "was built by another version: rebuild it."
        )
    hints = typing.get_type_hints(kind)
    return kind(**{name: _read(hints[name], raw[name], f"{where}.{name}") for name in fields})


def _unfit(where: str, raw: Any, expected: str) -> BundleError:
    return BundleError(
        f"manifest.json: {where}: received {raw!r}. Expected {expected}; rebuild the bundle."
    )
