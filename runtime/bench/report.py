"""A result as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .floor import StepFloor
from .session import Result
from .summary import ALL, PARTS, Figures, Spread
from .tree_choice import TreeChoice

MISSING = "–"


def print_result(console: Console, result: Result) -> None:
    """Machine, speed and acceptance of each contestant, categories, histograms, step cost."""
    _print_machine(console, result)
    console.print(_speed(result.figures))
    console.print(_rounds(result.figures))
    if any(f.category != ALL for f in result.figures):
        for bundle in dict.fromkeys(f.bundle for f in result.figures):
            console.print(_categories([f for f in result.figures if f.bundle == bundle]))
    for choice in result.trees:
        console.print(_choice(choice))
        console.print(choice.answer)
    console.print(_floors(result.floors))
    if result.skipped:
        console.print(
            f"{len(result.skipped)} prompts were left out, too long for a bundle's context: "
            f"{', '.join(result.skipped[:8])}{' …' if len(result.skipped) > 8 else ''}"
        )


def _print_machine(console: Console, result: Result) -> None:
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(
        f"{machine['cpu']} ({', '.join(machine['cpu_features']) or 'no listed features'}), "
        f"{machine['cores']} cores, {machine['threads']} threads, load "
        f"{machine['load_average_before']} before; {machine['system']}, Python "
        f"{machine['python']}, {versions}, commit {machine['commit'] or 'unknown'}"
    )
    for name, about in result.bundles.items():
        console.print(f"{name}: {', '.join(f'{k} {v}' for k, v in about.items())}")
    settings = result.settings
    console.print(
        f"{settings['num_prompts']} prompts, up to {settings['max_tokens']} tokens, temperature "
        f"{settings['temperature']}, {settings['repeats']} interleaved repeats: median (low–high)"
    )


def _speed(figures: Sequence[Figures]) -> Table:
    table = _table(
        "Speed",
        ("bundle", "mode"),
        ("decode tok/s", "× plain", "whole tok/s", "TTFT ms", "same as plain"),
    )
    for f in _overall(figures):
        table.add_row(
            f.bundle,
            f.mode,
            _spread(f.decode_tokens_per_s, 1, 1),
            _spread(f.speedup, 1, 2),
            _spread(f.output_tokens_per_s, 1, 1),
            _spread(f.ttft_s, 1000, 0),
            _percent(f.same_as_plain),
        )
    return table


def _rounds(figures: Sequence[Figures]) -> Table:
    # Only trees have rows to move.
    parts = [p for p in PARTS if p != "compact" or any(f.round_s[p] for f in figures)]
    columns = (
        "drafts",
        "mean length",
        "accepted",
        *(f"{part} ms" for part in parts),
        "overhead",
        "rounds",
        "drafted",
    )
    table = _table("Rounds", ("bundle", "mode"), (*columns, "by accepted drafts: 0, 1, …"))
    for f in _overall(figures):
        table.add_row(
            f.bundle,
            f.mode,
            MISSING if f.drafts_per_round is None else f"{f.drafts_per_round:.1f}",
            MISSING if f.mean_acceptance_length is None else f"{f.mean_acceptance_length:.2f}",
            _percent(f.acceptance_rate),
            *(f"{1000 * f.round_s[part]:.2f}" for part in parts),
            _percent(f.orchestration_share),
            str(f.num_rounds),
            _percent(f.num_spec_rounds / f.num_rounds if f.num_rounds else None),
            " ".join(str(n) for n in _trimmed(f.acceptance_histogram)) or MISSING,
        )
    return table


def _categories(figures: Sequence[Figures]) -> Table:
    modes = tuple(dict.fromkeys(f.mode for f in figures))
    title = f"Decode tok/s by category, × plain, mean acceptance length: {figures[0].bundle}"
    table = _table(title, ("category",), ("requests", *modes))
    for category in dict.fromkeys(f.category for f in figures if f.category != ALL):
        row = {f.mode: f for f in figures if f.category == category}
        cells = (_category_cell(row[mode]) if mode in row else MISSING for mode in modes)
        table.add_row(category, str(next(iter(row.values())).num_requests), *cells)
    return table


def _category_cell(f: Figures) -> str:
    rate = f"{f.decode_tokens_per_s.median:.1f}"
    if f.speedup is None:
        return rate
    length = f" {f.mean_acceptance_length:.2f}" if f.mean_acceptance_length else ""
    return f"{rate} ×{f.speedup.median:.2f}{length}"


def _choice(choice: TreeChoice) -> Table:
    title = f"Choosing a tree: {choice.bundle}, by acceptance per rank and the cost of each size"
    columns = ("verify ms", "draft ms", "tokens a verify", "tok/s", "best chain", "tok/s")
    table = _table(title, ("drafts", "tree (widths by depth)"), columns)
    for tree, chain in zip(choice.trees, choice.chains, strict=True):
        table.add_row(
            str(tree.nodes),
            tree.widths,
            f"{1000 * tree.verify_s:.2f}",
            f"{1000 * tree.draft_s:.2f}",
            f"{tree.tokens:.2f}",
            f"{tree.tokens_per_s:.1f}",
            f"{chain.tokens:.2f}",
            f"{chain.tokens_per_s:.1f}",
        )
    return table


def _floors(floors: Sequence[StepFloor]) -> Table:
    columns = ("bare run ms", "target step ms", "× bare", "plain round ms", "× bare", "context")
    table = _table("Step at query length 1 against the bare session run", ("bundle",), columns)
    for floor in floors:
        table.add_row(
            floor.bundle,
            f"{1000 * floor.bare_s:.2f}",
            f"{1000 * floor.target_step_s:.2f}",
            f"{floor.target_step_ratio:.2f}",
            f"{1000 * floor.round_s:.2f}",
            f"{floor.round_ratio:.2f}",
            str(floor.context),
        )
    return table


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _overall(figures: Sequence[Figures]) -> list[Figures]:
    return [f for f in figures if f.category == ALL]


def _spread(value: Spread | None, scale: float, digits: int) -> str:
    if value is None:
        return MISSING
    low, high = f"{scale * value.low:.{digits}f}", f"{scale * value.high:.{digits}f}"
    return f"{scale * value.median:.{digits}f} ({low}–{high})"


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f} %"


def _trimmed(histogram: Sequence[Any]) -> list[Any]:
    """Without the zeros behind the longest acceptance seen."""
    used = [i for i, count in enumerate(histogram) if count]
    return list(histogram[: used[-1] + 1]) if used else []
