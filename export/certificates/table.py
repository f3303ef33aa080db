"""Certificates as a reader sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from .report import Certificate, Figures


def as_table(found: Sequence[Certificate]) -> Table:
    """One row a certificate: status, claim, what was measured, time."""
    table = Table(
        title="Certificates: about the target as built, not its drift from the checkpoint"
    )
    for column in ("certificate", "status", "claim and figures"):
        table.add_column(column, overflow="fold")
    table.add_column("seconds", justify="right")
    for one in found:
        lines = [one.claim, _SAID[one.name](one.figures) if one.figures else "", one.reason]
        table.add_row(one.name, one.status, "\n".join(filter(None, lines)), f"{one.seconds:.0f}")
    return table


def _law(figures: Figures) -> str:
    return (
        f"{len(figures['total_variation'])} laws enumerated, worst total variation "
        f"{figures['worst']:.1e} (limit {figures['limit']:.0e})"
    )


def _frequency(figures: Figures) -> str:
    return "\n".join(
        f"{name}: {one['samples']} answers, chi-square {one['chi_square']:.1f} over "
        f"{one['cells']} outcomes (limit {one['limit']:.1f}, false alarm {one['false_alarm']:.0e}),"
        f" total variation {one['total_variation']:.3f}"
        + (f", {one['near_edge']} at a cut's edge" if one["near_edge"] else "")
        for name, one in figures.items()
    )


def _greedy(figures: Figures) -> str:
    return (
        f"{figures['equal_texts']} of {figures['prompts']} texts equal; "
        f"{figures['differences']} differ, at top-2 margins up to "
        f"{figures['widest_margin_at_a_difference']:.3g}, noise {figures['noise']:.3g}; "
        f"{figures['accepted_draft_tokens']} drafts accepted in {figures['tokens']} tokens"
    )


def _contract(figures: Figures) -> str:
    return ", ".join(f"{name} {str(value)[:16]}" for name, value in figures.items())


_SAID: dict[str, Callable[[Figures], str]] = {
    "law": _law,
    "tree law": _law,
    "frequency": _frequency,
    "greedy": _greedy,
    "contract": _contract,
}
