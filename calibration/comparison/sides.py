"""The two bundles of a comparison, and the four pairs of target and draft that they make."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.bundle import Bundle
from runtime.errors import BundleError, VocabularyMismatch
from runtime.executor import EngineOptions
from runtime.manifest import ModelDraft

from .graphs import DraftGraph, TargetGraph

REFERENCE, BUNDLE = "reference", "bundle"
NAMES = (REFERENCE, BUNDLE)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Whose target with whose draft."""

    target: str
    draft: str

    @property
    def key(self) -> str:
        return f"{self.target}+{self.draft}"

    def __str__(self) -> str:
        return f"{self.target} target, {self.draft} draft"


PAIRS = tuple(Pair(target=t, draft=d) for t in NAMES for d in NAMES)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One change and what it is measured from; swapping the bundles turns each into another's
    opposite."""

    name: str
    changed: Pair
    base: Pair


DIFFERENCES = (
    Difference(
        name="both",
        changed=Pair(target=BUNDLE, draft=BUNDLE),
        base=Pair(target=REFERENCE, draft=REFERENCE),
    ),
    *(
        Difference(
            name=f"target with the {d}'s draft",
            changed=Pair(target=BUNDLE, draft=d),
            base=Pair(target=REFERENCE, draft=d),
        )
        for d in NAMES
    ),
    *(
        Difference(
            name=f"draft with the {t}'s target",
            changed=Pair(target=t, draft=BUNDLE),
            base=Pair(target=t, draft=REFERENCE),
        )
        for t in NAMES
    ),
)


class Side:
    """One bundle's graphs, loaded, at one place of one prompt's text.

    The draft of a long prompt reads the last of its tokens alone: `window` of them at most.
    """

    def __init__(self, bundle: Bundle, options: EngineOptions, window: int) -> None:
        self.target = TargetGraph(bundle, options)
        self.draft = DraftGraph(bundle, options)
        self._window = window
        self._prompt: tuple[int, ...] = ()

    def begin(self, prompt: tuple[int, ...]) -> None:
        """Read all of a prompt but its last token, unless that was the last one read."""
        if prompt != self._prompt:
            self.target.graph.length = self.draft.graph.length = 0
            self._prompt = ()  # not read yet, should reading fail
            self.target.read(prompt[:-1])
            self.draft.read(prompt[-self._window :][:-1])
            self._prompt = prompt
        self.rewind(0)

    def rewind(self, count: int) -> None:
        """As if `count` tokens behind the prompt were committed, the last of them unread."""
        self.target.graph.length = len(self._prompt) - 1 + count
        self.draft.graph.length = min(len(self._prompt), self._window) - 1 + count


def check_comparable(reference: Bundle, bundle: Bundle) -> None:
    """Both speak the same tokens and both draft. Raises VocabularyMismatch or BundleError."""
    ours, theirs = bundle.manifest, reference.manifest
    if ours.tokenizer_sha256 != theirs.tokenizer_sha256:
        raise VocabularyMismatch(
            f"tokenizer: received {ours.tokenizer_sha256[:12]} in {bundle.path} and "
            f"{theirs.tokenizer_sha256[:12]} in {reference.path}. Expected the same tokenizer; "
            "compare bundles of one checkpoint."
        )
    if ours.target.vocab_size != theirs.target.vocab_size:
        raise VocabularyMismatch(
            f"target vocabulary: received {ours.target.vocab_size} tokens in {bundle.path} and "
            f"{theirs.target.vocab_size} in {reference.path}. Expected the same number; compare "
            "bundles of one checkpoint."
        )
    for side in (bundle, reference):
        if not isinstance(side.manifest.draft, ModelDraft):
            raise BundleError(
                f"{side.path}: received a bundle without a draft model of the target's "
                "tokens. Expected a target and a draft, whose acceptance can be compared; rebuild "
                "it with --draft DIR."
            )
