"""Plots as SVG text: categories along x, one mark for each series and category.

Each mark carries its figure in `data-value`, so what is drawn can be read back from the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, PLOT_HEIGHT = 760, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 26
LETTER = 6.5  # width of one, about
TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Value:
    """A figure and, where it has one, its interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One figure for each label of the frame; None draws nothing. color: a CSS class, s0 … s3."""

    name: str
    color: str
    values: tuple[Value | None, ...]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The axes: `labels` along x, low to high along y."""

    labels: tuple[str, ...]
    low: float
    high: float

    @property
    def step(self) -> float:
        return (WIDTH - LEFT - RIGHT) / len(self.labels)

    def x(self, label: int, series: int, count: int) -> float:
        """Series stand side by side within four fifths of a label's width."""
        return LEFT + self.step * (label + 0.1 + 0.8 * (series + 0.5) / count)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return TOP + PLOT_HEIGHT * (1 - min(1.0, max(0.0, share)))

    @property
    def crowded(self) -> bool:
        """Whether labels would run into each other, and are turned."""
        return max(len(label) for label in self.labels) * LETTER > self.step

    @property
    def height(self) -> float:
        """Of the whole, with room for the labels."""
        longest = max(len(label) for label in self.labels) * LETTER / 2  # turned by 30 degrees
        return TOP + PLOT_HEIGHT + BOTTOM + (longest if self.crowded else 0)


Marks = Callable[[Frame, Series, int, int], str]


def frame_for(labels: Sequence[str], series: Sequence[Series]) -> Frame:
    """Axes that hold 0 and everything drawn."""
    found = [v for s in series for v in s.values if v is not None]
    ends = [e for v in found for e in (v.value, v.low, v.high) if e is not None]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    step = _round_up((high - low) / TICKS or 0.2)
    return Frame(
        labels=tuple(labels),
        low=math.floor(low / step) * step,
        high=max(math.ceil(high / step), 1) * step,
    )


def plot(name: str, frame: Frame, series: Sequence[Series], marks: Marks) -> str:
    """One figure; `name` is its element's id."""
    drawn = [marks(frame, s, i, len(series)) for i, s in enumerate(series)]
    return (
        f'<svg id="{escape(name)}" viewBox="0 0 {WIDTH} {frame.height:.0f}" role="img">'
        f"{_grid(frame)}{''.join(drawn)}{_labels(frame)}</svg>{_legend(series)}"
    )


def bars(frame: Frame, series: Series, index: int, count: int) -> str:
    width = frame.step * 0.8 / count * 0.9
    parts = []
    for i, value in enumerate(series.values):
        if value is not None:
            x, y, zero = frame.x(i, index, count), frame.y(value.value), frame.y(0)
            shape = (
                f'<rect x="{x - width / 2:.2f}" y="{min(y, zero):.2f}" width="{width:.2f}" '
                f'height="{abs(zero - y):.2f}"'
            )
            parts.append(_mark(shape, "rect", frame, series, i, value))
            parts.append(_whisker(frame, x, value))
    return "".join(parts)


def points(frame: Frame, series: Series, index: int, count: int) -> str:
    parts = []
    for i, value in enumerate(series.values):
        if value is not None:
            x = frame.x(i, index, count)
            shape = f'<circle cx="{x:.2f}" cy="{frame.y(value.value):.2f}" r="4"'
            parts.append(_whisker(frame, x, value))
            parts.append(_mark(shape, "circle", frame, series, i, value))
    return "".join(parts)


def lines(frame: Frame, series: Series, index: int, count: int) -> str:
    """Points joined from label to label."""
    places = [
        f"{frame.x(i, index, count):.2f},{frame.y(v.value):.2f}"
        for i, v in enumerate(series.values)
        if v is not None
    ]
    joined = f'<polyline class="{series.color}" points="{" ".join(places)}"/>'
    return joined + points(frame, series, index, count)


def _mark(shape: str, element: str, frame: Frame, series: Series, label: int, value: Value) -> str:
    span = "" if value.low is None else f" ({value.low:.4g} … {value.high:.4g})"
    title = f"{series.name}, {frame.labels[label]}: {value.value:.4g}{span}"
    return (
        f'{shape} class="{series.color}" data-series="{escape(series.name)}" '
        f'data-label="{escape(frame.labels[label])}" data-value="{value.value!r}">'
        f"<title>{escape(title)}</title></{element}>"
    )


def _whisker(frame: Frame, x: float, value: Value) -> str:
    if value.low is None or value.high is None:
        return ""
    low, high = frame.y(value.low), frame.y(value.high)
    return f'<line class="w" x1="{x:.2f}" x2="{x:.2f}" y1="{low:.2f}" y2="{high:.2f}"/>'


def _grid(frame: Frame) -> str:
    step = _round_up((frame.high - frame.low) / TICKS)
    first, last = math.ceil(frame.low / step - 1e-9), math.floor(frame.high / step + 1e-9)
    parts = []
    for i in range(first, last + 1):
        y = frame.y(i * step)
        line = f'<line class="{"axis" if i == 0 else "grid"}" x1="{LEFT}" x2="{WIDTH - RIGHT}"'
        parts.append(f'{line} y1="{y:.2f}" y2="{y:.2f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4:.2f}">{i * step:.3g}</text>')
    return "".join(parts)


def _labels(frame: Frame) -> str:
    parts = []
    for i, label in enumerate(frame.labels):
        x, y = LEFT + frame.step * (i + 0.5), TOP + PLOT_HEIGHT + 16
        turn = (
            f' class="turned" transform="rotate(-30 {x:.2f} {y})"'
            if frame.crowded
            else ' class="x"'
        )
        parts.append(f'<text x="{x:.2f}" y="{y}"{turn}>{escape(label)}</text>')
    return "".join(parts)


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    keys = (f'<span class="{s.color}"></span>{escape(s.name)}' for s in series)
    return f'<p class="legend">{" ".join(f"<span>{key}</span>" for key in keys)}</p>'


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))
