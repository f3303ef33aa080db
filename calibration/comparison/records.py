"""What one prompt at one temperature said: sums that any cell of the report is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The bundle's target against the reference's on one text; at temperature 1, sums in nats."""

    kl: float  # Σ KL(reference ‖ bundle)
    tv: float  # Σ total variation
    nll_reference: float  # −Σ log p of the text
    nll_bundle: float
    flips: tuple[int, ...]  # where the likeliest token differs
    flip_margins: tuple[float, ...]  # the reference's top-2 margin there, in logits


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Where greedy text would first differ, and into what."""

    position: int  # of the text, 0 the first token behind the prompt
    reference_token: int
    bundle_token: int
    margin: float  # the reference's, in logits


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Rounds of one pair by position, 1 first: sums of expectations, and counts."""

    count: int
    reached: tuple[float, ...]  # Σ chance that all earlier drafts are accepted
    passed: tuple[float, ...]  # Σ that chance · Σ min(p, q)
    evaluated: tuple[int, ...]  # rounds whose earlier drafts were all accepted
    accepted: tuple[int, ...]
    unknown: int  # drafted tokens that the draft's own q gives no chance


@dataclass(frozen=True, kw_only=True)
class FreeText:
    """Text that a pair wrote by itself, round after round."""

    rounds: int
    accepted: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One prompt at one temperature; mappings are by the pair's key, empty without drafts."""

    prompt: str
    category: str
    temperature: float
    path: tuple[int, ...]  # the reference's text
    overlap: Mapping[str, float]  # Σ over the text of Σ min(p, q)
    drift: Drift
    first_flip: Flip | None
    rounds: Mapping[str, Rounds]
    free: Mapping[str, FreeText]  # empty where this prompt was not among those

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Record:
        """Raises TypeError or KeyError for a record of another schema."""
        flip = raw["first_flip"]
        return cls(
            **{
                **raw,
                "path": tuple(raw["path"]),
                "drift": Drift(**_tuples(raw["drift"])),
                "first_flip": None if flip is None else Flip(**flip),
                "rounds": {key: Rounds(**_tuples(r)) for key, r in raw["rounds"].items()},
                "free": {key: FreeText(**f) for key, f in raw["free"].items()},
            }
        )


def _tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
