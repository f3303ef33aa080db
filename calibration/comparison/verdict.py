"""What the figures come to: where a difference comes from, and which precision to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from runtime.bundle import Bundle

from .cells import ALL, Cell
from .positions import Length
from .records import Record
from .resamples import Interval
from .sides import BUNDLE, NAMES, PAIRS, REFERENCE, Pair, why_no_acceptance
from .speed import Rate, Speed

NEAR_KL = 0.05  # nats a token that a target may be from its reference, where no limit is given


def overall(cells: Sequence[Cell]) -> Cell:
    """The cell of all categories and temperatures."""
    return [cell for cell in cells if cell.category == ALL][-1]


def findings(
    records: Sequence[Record], cells: Sequence[Cell], reference: Bundle, bundle: Bundle
) -> list[str]:
    """Sentences, the gravest first; none where nothing differs."""
    if reason := why_no_acceptance(reference, bundle):
        return [f"Acceptance was not compared: {reason}."]
    return [*_maps(reference, bundle), *_unknown(records), *_source(overall(cells))]


def _maps(reference: Bundle, bundle: Bundle) -> list[str]:
    """A draft whose tokens mean other tokens than the reference's drafts badly and runs well."""
    ours, theirs = bundle.d2t, reference.d2t
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return []
    differing = np.flatnonzero(ours != theirs)
    if not len(differing):
        return []
    first = int(differing[0])
    return [
        f"d2t: {len(differing)} of {len(ours)} entries of the bundle's draft differ from the "
        f"reference's, first entry {first}: target id {first + int(ours[first])}, the reference "
        f"says {first + int(theirs[first])}. Unless the drafts were trained apart, it is wrong."
    ]


def _unknown(records: Sequence[Record]) -> list[str]:
    """A map in the draft's graph that isn't the map of d2t.npy."""
    found = []
    for name in NAMES:
        rounds = [r.rounds[Pair(target=REFERENCE, draft=name).key] for r in records]
        unknown = sum(r.unknown for r in rounds)
        total = sum(r.count * len(r.reached) for r in rounds)
        if unknown:
            found.append(
                f"{unknown} of {total} tokens that the {name}'s draft proposed have no chance by "
                "its own q: its graph and its d2t.npy map to different tokens."
            )
    return found


def _source(cell: Cell) -> list[str]:
    """Target's and draft's share of a change that is more than chance."""
    both = cell.differences["both"]
    if both is None or both.is_chance:
        return []
    parts = {
        part: _mean([cell.differences[f"{part} with the {n}'s {other}"] for n in NAMES])
        for part, other in (("target", "draft"), ("draft", "target"))
    }
    larger = max(parts, key=lambda part: abs(parts[part]))
    return [
        f"acceptance changes by {both.value:+.4f}, more than chance (95 %: {both.low:+.4f} to "
        f"{both.high:+.4f}): "
        f"{parts['target']:+.4f} by the target, {parts['draft']:+.4f} by the draft; most of it "
        f"comes from the {larger}."
    ]


def _mean(intervals: Sequence[Interval | None]) -> float:
    values = [i.value for i in intervals if i is not None]
    return sum(values) / len(values) if values else 0.0


def recommendation(
    cells: Sequence[Cell],
    lengths: Sequence[Length],
    speeds: Sequence[Speed],
    precisions: Mapping[str, tuple[str, str]],  # by side: of target and draft
    max_kl: float | None,
) -> str:
    """Which target and draft to run, and why: the fastest pair whose target is near enough."""
    cell, limit = overall(cells), NEAR_KL if max_kl is None else max_kl
    kl = cell.drift.kl.value if cell.drift.kl else 0.0
    near = kl <= limit
    allowed = [pair for pair in PAIRS if near or pair.target == REFERENCE]
    best = _best(allowed, cell, speeds)
    base = Pair(target=REFERENCE, draft=REFERENCE)
    parts = [
        f"Run the {precisions[best.target][0]} target ({best.target})"
        + (f" {_drafting(best, precisions, speeds)}" if lengths else ""),
        _speed_clause(best, base, speeds),
        _acceptance_clause(cell, lengths, best, base),
        f"the bundle's target is KL {kl:.4f} from the reference's, "
        f"{'within' if near else 'beyond'} the {limit:g} that counts as near",
    ]
    return "; ".join(part for part in parts if part) + "."


def _acceptance_clause(cell: Cell, lengths: Sequence[Length], best: Pair, base: Pair) -> str:
    if not lengths:
        return ""
    return (
        f"mean acceptance {_value(cell, best)} against {_value(cell, base)} of the reference pair, "
        f"mean acceptance length {_length(lengths, best)} against {_length(lengths, base)}"
    )


def _best(allowed: Sequence[Pair], cell: Cell, speeds: Sequence[Speed]) -> Pair:
    """Of equals the one with more of the reference, named first in PAIRS."""
    if speeds:
        return max(allowed, key=lambda pair: speeds[-1].measured[pair.key].tokens_per_s)
    if any(pair.target == BUNDLE for pair in allowed):  # the smaller one, where it is near enough
        allowed = [pair for pair in allowed if pair.target == BUNDLE]
    return max(allowed, key=lambda pair: getattr(cell.acceptance[pair.key], "value", 0.0))


def _drafting(
    best: Pair, precisions: Mapping[str, tuple[str, str]], speeds: Sequence[Speed]
) -> str:
    if speeds and speeds[-1].measured[best.key].k == 0:
        return "without speculation"
    return f"with the {precisions[best.draft][1]} draft ({best.draft})"


def _speed_clause(best: Pair, base: Pair, speeds: Sequence[Speed]) -> str:
    if not speeds:
        return "speed is not predicted, since a bundle has no reports/latency.json"
    found, other = speeds[-1].measured[best.key], speeds[-1].measured[base.key]
    return (
        f"{found.tokens_per_s:.1f} tokens/s by the latency profiles {_how(found)}, "
        f"{found.tokens_per_s / other.tokens_per_s:.2f} × the reference pair's {_how(other)}"
    )


def _how(rate: Rate) -> str:
    return f"at k = {rate.k}" if rate.k else "without speculation"


def _value(cell: Cell, pair: Pair) -> str:
    found = cell.acceptance[pair.key]
    return "–" if found is None else f"{found.value:.3f}"


def _length(lengths: Sequence[Length], pair: Pair) -> str:
    found = lengths[-1].rounds[pair.key]
    return "–" if found is None else f"{found.value:.2f}"
