"""A result as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .cells import ALL, Cell
from .layers import Layers
from .resamples import Interval
from .result import Result
from .sides import DIFFERENCES, PAIRS, Pair
from .speed import Speed

MISSING = "–"


def print_result(console: Console, result: Result) -> None:
    """Acceptance, positions, lengths and speed, drift, layers; findings and recommendation."""
    drafts = (_acceptance, _differences, _positions, _lengths) if result.lengths else ()
    for table in (
        *(made(result) for made in drafts),
        _drift(result.cells),
        _layers(result.layers, "target"),
        _layers(result.draft_layers, "draft"),
    ):
        console.print(table)
    if result.skipped:
        console.print(f"left out, too long: {', '.join(result.skipped)}")
    for finding in result.findings:
        console.print(f"• {finding}", highlight=False)
    console.print(result.recommendation, highlight=False)


def _acceptance(result: Result) -> Table:
    table = _table(
        "Acceptance, Σ min(p, q) on the reference's text: target × draft of (ref)erence, (bun)dle",
        ("temperature", "category", "prompts", "tokens"),
        [*map(_short, PAIRS), "change, both (95 % by prompts)"],
    )
    for cell in _shown(result.cells):
        values = [_number(cell.acceptance[pair.key], ".3f") for pair in PAIRS]
        table.add_row(*_labels(cell), *values, _span(cell.differences["both"]))
    return table


def _differences(result: Result) -> Table:
    """What target and draft each change, over all categories."""
    table = _table(
        "Change of acceptance, bundle − reference",
        ("temperature", "what changes"),
        ("change (95 % by prompts)",),
    )
    for cell in (cell for cell in result.cells if cell.category == ALL):
        for difference in DIFFERENCES:
            found = cell.differences[difference.name]
            table.add_row(str(cell.temperature), difference.name, _span(found))
    return table


def _positions(result: Result) -> Table:
    columns = [_short(pair) for pair in PAIRS]
    table = _table(
        "Acceptance by position in a round: expected (realised)",
        ("temperature", "position"),
        [*columns, "change, both"],
    )
    for position in result.positions:
        values = []
        for pair in PAIRS:
            realised = position.realised[pair.key]
            seen = MISSING if realised is None else f"{realised:.3f}"
            values.append(f"{_number(position.acceptance[pair.key], '.3f')} ({seen})")
        change = _span(position.differences["both"])
        table.add_row(str(position.temperature), str(position.position), *values, change)
    return table


def _lengths(result: Result) -> Table:
    table = _table(
        f"Mean acceptance length at k = {result.settings['k']}, and speed by the latency profiles",
        ("temperature", "target × draft"),
        ("predicted", "rounds", "realised", "own text", "best k", "tokens/s", "predicted"),
    )
    speeds = {speed.temperature: speed for speed in result.speeds}
    for length in result.lengths:
        for pair in PAIRS:
            key, speed = pair.key, speeds.get(length.temperature)
            free = length.free[key]
            rates = _rates(speed, key) if speed else (MISSING,) * 3
            table.add_row(
                str(length.temperature),
                f"{pair.target} × {pair.draft}",
                f"{length.predicted[key]:.2f}",
                _number(length.rounds[key], ".2f"),
                f"{length.realised[key]:.2f}",
                MISSING if free is None else f"{free:.2f}",
                *rates,
            )
    return table


def _rates(speed: Speed, key: str) -> tuple[str, str, str]:
    found, predicted = speed.measured[key], speed.predicted[key]
    return str(found.k), f"{found.tokens_per_s:.1f}", f"{predicted.tokens_per_s:.1f}"


def _drift(cells: Sequence[Cell]) -> Table:
    table = _table(
        "Drift of the target from the reference's, a token",
        ("temperature", "category", "prompts", "tokens"),
        ("KL", "TV", "top-1 flips", "median margin", "perplexity", "reference's"),
    )
    for cell in _shown(cells):
        drift = cell.drift
        margin = drift.median_flip_margin
        table.add_row(
            *_labels(cell),
            _number(drift.kl, ".4f"),
            _number(drift.tv, ".4f"),
            _number(drift.flip_rate, ".1%"),
            MISSING if margin is None else f"{margin:.3f}",
            f"{drift.perplexity_bundle:.2f}",
            f"{drift.perplexity_reference:.2f}",
        )
    return table


def _layers(layers: Layers, model: str) -> Table | str:
    if not layers.layers:
        return f"layers of the {model}: not measured ({layers.skipped})"
    table = _table(
        f"The layers of the {model} that cost most alone, on {layers.tokens} tokens",
        ("layer",),
        ("KL", "weight error"),
    )
    for layer in layers.worst:
        error = layer.weight_error
        shown = MISSING if error is None else f"{error:.2%}"
        table.add_row(layer.name, f"{layer.kl:.5f}", shown)
    return table


def _shown(cells: Sequence[Cell]) -> list[Cell]:
    """Each temperature, and each category at all of them; the page and the JSON have every cell."""
    return [cell for cell in cells if ALL in (cell.category, cell.temperature)]


def _short(pair: Pair) -> str:
    return f"{pair.target[:3]} × {pair.draft[:3]}"


def _labels(cell: Cell) -> tuple[str, str, str, str]:
    return str(cell.temperature), cell.category, str(cell.prompts), str(cell.tokens)


def _number(found: Interval | None, form: str) -> str:
    return MISSING if found is None else format(found.value, form)


def _span(found: Interval | None) -> str:
    if found is None:
        return MISSING
    if found.low is None:
        return f"{found.value:+.4f}"
    return f"{found.value:+.4f} ({found.low:+.4f} … {found.high:+.4f})"


def _table(title: str, labels: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in labels:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right")
    return table
