"""The two bundles of a comparison, and the four pairs of target and draft that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from runtime.bundle import Bundle
from runtime.errors import BundleError, VocabularyMismatch
from runtime.manifest import EagleDraft, MedusaDraft

from .drafting import BundleDrafter, ComparedDraft, Drafted
from .graphs import TargetGraph
from .opened import OpenBundle

Array = NDArray[Any]

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
    """One bundle's target at one place of one prompt's text."""

    def __init__(self, target: TargetGraph) -> None:
        self.target = target
        self.prompt: tuple[int, ...] = ()

    def begin(self, prompt: tuple[int, ...]) -> None:
        """Read all of a prompt but its last token, unless that was the last one read."""
        if prompt != self.prompt:
            self.target.graph.length = 0
            self.prompt = ()  # not read yet, should reading fail
            self.target.read(prompt[:-1])
            self.prompt = prompt
        self.rewind(0)

    def rewind(self, count: int) -> None:
        """As if `count` tokens behind the prompt were committed, the last of them unread."""
        self.target.graph.length = len(self.prompt) - 1 + count


class Drafts:
    """What drafts in each of the four pairs; without bundles nothing does.

    A head reads the states of the target that it drafts for, so it is another one in each pair. A
    draft model reads tokens alone, and is the same for both targets.
    """

    def __init__(self, opened: Mapping[str, OpenBundle], sides: Mapping[str, Side], k: int) -> None:
        self._of: dict[Pair, BundleDrafter] = {}
        for name, bundle in opened.items():
            reads_states = bundle.bundle.manifest.feature_width > 0
            alone = None if reads_states else bundle.drafter(k, None)
            for target in NAMES:
                drafter = alone or bundle.drafter(k, sides[target].target.features)
                self._of[Pair(target=target, draft=name)] = drafter

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """In the order of PAIRS."""
        return tuple(pair for pair in PAIRS if pair in self._of)

    def of(self, pair: Pair) -> BundleDrafter:
        return self._of[pair]

    def begin(self) -> None:
        """Forget all that was read, so that nothing depends on what was measured before."""
        for drafter in self._of.values():
            drafter.begin()

    def propose(
        self, tokens: Sequence[int], k: int, temperature: float, uniforms: Array
    ) -> dict[Pair, Drafted]:
        """Of each pair; uniforms: [k]."""
        made: dict[int, Drafted] = {}
        for drafter in self._of.values():
            if id(drafter) not in made:
                made[id(drafter)] = drafter.propose(tokens, k, temperature, uniforms)
        return {pair: made[id(drafter)] for pair, drafter in self._of.items()}


def check_comparable(reference: Bundle, bundle: Bundle) -> None:
    """Both speak the same tokens, and run here. Raises VocabularyMismatch or BundleError."""
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
        if side.manifest.backend != "onnxruntime":
            raise BundleError(
                f"{side.path}: received a bundle of --backend {side.manifest.backend}. Expected "
                "one of --backend onnxruntime, which runs anywhere."
            )


def why_no_acceptance(reference: Bundle, bundle: Bundle) -> str:
    """Empty where each side's draft can be tried on either target."""
    for side in (bundle, reference):
        draft = side.manifest.draft
        if not isinstance(draft, ComparedDraft):
            what = draft.name if draft else "nothing"
            return (
                f"{side.path.name} drafts by {what}, which is not a draft model of the target's "
                "tokens, an EAGLE or a Medusa head"
            )
    ours, theirs = _reads(bundle), _reads(reference)
    if ours != theirs:
        return (
            f"the draft of {bundle.path.name} reads {ours}, that of {reference.path.name} {theirs}"
        )
    return ""


def _reads(bundle: Bundle) -> str:
    draft = bundle.manifest.draft
    if isinstance(draft, EagleDraft):
        return f"the target's states at layers {', '.join(map(str, draft.taps))}"
    return "the target's last state" if isinstance(draft, MedusaDraft) else "tokens alone"
