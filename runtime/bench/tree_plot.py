"""What trees and chains commit and how fast, against the number of drafts, as one SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plan import AUTO
from .summary import ALL, Figures
from .tree_choice import TreeChoice

KINDS = ("chain", "static tree", "dynamic tree")
MARKS = dict(zip(KINDS, ("o", "s", "^"), strict=True))


def kind_of(mode: str) -> str | None:
    """By a contestant's label; None for plain decoding and the automatic choice."""
    if mode in ("plain", AUTO):
        return None
    if mode.startswith("k="):
        return "chain"
    return "dynamic tree" if mode.startswith("dynamic") else "static tree"


def can_plot() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def plot_trees(figures: Sequence[Figures], choices: Sequence[TreeChoice], path: Path) -> None:
    """Measured modes as marks; what the choice expects of each size as lines. Needs matplotlib."""
    from matplotlib.figure import Figure

    bundles = [choice.bundle for choice in choices]
    figure = Figure(figsize=(11, 4.2 * len(bundles)), layout="constrained")
    axes: Any = figure.subplots(len(bundles), 2, squeeze=False)
    for row, choice in zip(axes, choices, strict=True):
        ours = [f for f in figures if f.bundle == choice.bundle and f.category == ALL]
        for kind in KINDS:
            found = sorted((f for f in ours if kind_of(f.mode) == kind), key=_drafts)
            for axis, value in zip(row, (_length, _rate), strict=True):
                axis.plot(
                    [_drafts(f) for f in found],
                    [value(f) for f in found],
                    MARKS[kind],
                    label=f"{kind}, measured",
                )
        for name, sizes in (("best static tree", choice.trees), ("best chain", choice.chains)):
            nodes = [one.nodes for one in sizes]
            row[0].plot(nodes, [one.tokens for one in sizes], "-", lw=1, label=f"{name}, expected")
            row[1].plot(nodes, [one.tokens_per_s for one in sizes], "-", lw=1)
        plain = [f.decode_tokens_per_s.median for f in ours if f.mode == "plain"]
        for rate in plain:
            row[1].axhline(rate, color="0.6", lw=1, label="plain, measured")
        row[0].set(title=choice.bundle, xlabel="drafts a round", ylabel="tokens a verification")
        row[1].set(
            title=choice.bundle, xlabel="drafts a round", ylabel="tokens / s", ylim=(0, None)
        )
        for axis in row:
            axis.legend(fontsize=7)
    figure.savefig(path)


def _drafts(f: Figures) -> float:
    return f.drafts_per_round or 0.0


def _length(f: Figures) -> float:
    return f.mean_acceptance_length or 1.0


def _rate(f: Figures) -> float:
    return f.decode_tokens_per_s.median
