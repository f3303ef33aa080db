"""One prompt at one temperature through both bundles: the same tokens, the same uniforms.

The text is the reference's own; the bundle's target drafts it, which is quick and leaves it exactly
the reference target's law. Both bundles then read that text (teacher forcing), and rounds begin at
the same places of it, so that every difference is paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.uniforms import DRAFT

from ..prompts import TokenizedPrompt
from .drafting import Drafted, TargetAsDraft
from .law import Apart, law, overlap, top_margin
from .records import Drift, Flip, FreeText, Record, Rounds
from .rounds import Judged, judge, verify
from .settings import Settings
from .sides import BUNDLE, NAMES, REFERENCE, Drafts, Pair, Side
from .writing import WRITING_K, Place, deciding, write

Array = NDArray[Any]
Tokens = tuple[int, ...]


class Measurement:
    """Both sides, loaded, and what to ask them."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        drafts: Drafts,
        settings: Settings,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._sides = sides
        self._drafts = drafts
        self._settings = settings
        self._eos = frozenset(eos_token_ids)

    def record(
        self,
        prompt: TokenizedPrompt,
        temperature: float,
        path: Tokens | None,
        writes_freely: Callable[[TokenizedPrompt], bool],
    ) -> Record:
        """`path` None lets the reference write the text."""
        place = Place(prompt, temperature, self._settings)
        if path is None:
            path = self._reference_text(place)
        overlaps, drift, flip = self._forced(place, path)
        pairs = self._drafts.pairs if writes_freely(prompt) else ()
        return Record(
            prompt=prompt.id,
            category=prompt.category,
            temperature=temperature,
            path=path,
            overlap=overlaps,
            drift=drift,
            first_flip=flip,
            rounds=self._rounds(place, path),
            free={pair.key: self._free_text(place, pair) for pair in pairs},
        )

    def _reference_text(self, place: Place) -> Tokens:
        bundle = self._sides[BUNDLE]
        bundle.begin(place.prompt.tokens)
        drafter = TargetAsDraft(bundle.target, place.prompt.tokens[:-1])
        text, _ = write(
            place,
            self._sides[REFERENCE],
            drafter,
            lambda missing: min(WRITING_K, missing),
            self._eos,
        )
        return self._cut(text)

    def _free_text(self, place: Place, pair: Pair) -> FreeText:
        """The round that ends the text counts whole."""
        verifier, drafter, k = self._sides[pair.target], self._drafts.of(pair), self._settings.k
        text, rounds = write(place, verifier, drafter, lambda _missing: k, self._eos)
        return FreeText(rounds=rounds, accepted=len(text) - rounds, tokens=len(text))

    def _cut(self, text: Sequence[int]) -> Tokens:
        """Up to the end token, itself included, or the length asked for."""
        text = text[: self._settings.path_tokens]
        ends = [i for i, token in enumerate(text) if token in self._eos]
        return tuple(text[: ends[0] + 1] if ends else text)

    def _forced(self, place: Place, path: Tokens) -> tuple[dict[str, float], Drift, Flip | None]:
        """Both bundles on the same text, row by row."""
        queries = [place.prompt.tokens[-1], *path[:-1]]
        logits = {}
        for name, side in self._sides.items():
            side.begin(place.prompt.tokens)
            logits[name] = side.target.rows(queries)
        self._drafts.begin()
        overlaps = dict.fromkeys((pair.key for pair in self._drafts.pairs), 0.0)
        for i in range(len(queries)):
            p = {name: law(logits[name][i], place.temperature) for name in NAMES}
            known = [*place.prompt.tokens, *path[:i]]
            drafted = self._drafts.propose(known, 1, place.temperature, np.zeros(1))
            for pair, drafts in drafted.items():
                for q in drafts.q:
                    overlaps[pair.key] += overlap(p[pair.target], q, drafts.ids)
        return overlaps, *_drift(logits[REFERENCE], logits[BUNDLE], path)

    def _rounds(self, place: Place, path: Tokens) -> dict[str, Rounds]:
        """From the last place to the first: what a round writes lies behind the places to come."""
        tallies = {pair.key: _Tally(self._settings.k) for pair in self._drafts.pairs}
        uniforms = place.uniforms("rounds")
        for start in sorted(_starts(len(path), self._settings.rounds), reverse=True):
            for pair, judged, drafted in self._round(place, path, start, uniforms):
                tallies[pair.key].add(judged, drafted)
        return {key: tally.result() for key, tally in tallies.items()}

    def _round(
        self, place: Place, path: Tokens, start: int, uniforms: Array
    ) -> list[tuple[Pair, Judged, Drafted]]:
        """All proposals before either target verifies, each judged by the pair's own."""
        known, k = [*place.prompt.tokens, *path[:start]], self._settings.k
        drafted = self._drafts.propose(known, k, place.temperature, uniforms[DRAFT, start:])
        decided_by = deciding(uniforms, start, k)
        laws: dict[tuple[str, Tokens], Array] = {}  # both drafts often propose the same tokens
        result = []
        for pair, drafts in drafted.items():
            key = pair.target, drafts.tokens
            if key not in laws:
                side = self._sides[pair.target]
                side.rewind(start)
                laws[key] = verify(side.target, known[-1], drafts.tokens, place.temperature)
            result.append((pair, judge(laws[key], drafts, *decided_by), drafts))
        return result


class _Tally:
    """Sums over the rounds of one pair."""

    def __init__(self, k: int) -> None:
        self._count = self._unknown = 0
        self._reached, self._passed = np.zeros(k), np.zeros(k)
        self._evaluated, self._accepted = np.zeros(k, np.int64), np.zeros(k, np.int64)

    def add(self, judged: Judged, drafted: Drafted) -> None:
        self._count += 1
        drafts = len(drafted.tokens)  # heads have fewer than k, where there are fewer heads
        reached, positions = np.cumprod([1.0, *judged.chance])[:drafts], np.arange(drafts)
        self._reached[:drafts] += reached
        self._passed[:drafts] += reached * judged.overlap
        self._evaluated[:drafts] += positions <= judged.num_accepted
        self._accepted[:drafts] += positions < judged.num_accepted
        self._unknown += drafted.q_of_token.count(0.0)

    def result(self) -> Rounds:
        return Rounds(
            count=self._count,
            reached=tuple(self._reached.tolist()),
            passed=tuple(self._passed.tolist()),
            evaluated=tuple(self._evaluated.tolist()),
            accepted=tuple(self._accepted.tolist()),
            unknown=self._unknown,
        )


def _starts(length: int, rounds: int) -> set[int]:
    """Places spread evenly over a text; fewer where it is short."""
    return {(2 * i + 1) * length // (2 * rounds) for i in range(rounds)}


def _drift(reference: Array, bundle: Array, path: Tokens) -> tuple[Drift, Flip | None]:
    """reference, bundle: logits [len(path), vocab], the row that each token was drawn from."""
    found = [Apart.of(*rows) for rows in zip(reference, bundle, path, strict=True)]
    flips = np.flatnonzero(reference.argmax(-1) != bundle.argmax(-1)).tolist()
    margins = tuple(top_margin(reference[i]) for i in flips)
    drift = Drift(
        kl=sum(row.kl for row in found),
        tv=sum(row.tv for row in found),
        nll_reference=sum(row.nll_p for row in found),
        nll_bundle=sum(row.nll_q for row in found),
        flips=tuple(flips),
        flip_margins=margins,
    )
    return drift, _first_flip(reference, bundle, drift)


def _first_flip(reference: Array, bundle: Array, drift: Drift) -> Flip | None:
    if not drift.flips:
        return None
    place = drift.flips[0]
    return Flip(
        position=place,
        reference_token=int(reference[place].argmax()),
        bundle_token=int(bundle[place].argmax()),
        margin=drift.flip_margins[0],
    )
