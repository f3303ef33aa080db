"""The report as one page that needs nothing else: styles and plots inside, no script, no network.

The whole result stands in it as JSON, too: `<script type="application/json" id="result">`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .cells import ALL
from .plots import Series, Value, bars, frame_for, lines, plot, points
from .sides import DIFFERENCES, PAIRS

Json = Mapping[str, Any]

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:820px;margin:2em auto;padding:0 1em}
body{color:#1b1f24}
h1{font-size:1.5em}h2{font-size:1.15em;margin:2em 0 .3em}p{margin:.4em 0}
table{border-collapse:collapse;font-size:13px;margin:.6em 0;font-variant-numeric:tabular-nums}
th,td{padding:2px 8px;text-align:right;border-bottom:1px solid #e3e6ea}
th:first-child,td:first-child,td.t{text-align:left}
.say{background:#eef4fb;border-left:4px solid #2a6fbb;padding:.6em .9em}
.bad{background:#fdecea;border-left:4px solid #c0392b;padding:.6em .9em}
.note{color:#57606a;font-size:13px}svg{width:100%;height:auto}
svg text{font-size:12px;fill:#57606a}svg .y,svg .turned{text-anchor:end}svg .x{text-anchor:middle}
.grid{stroke:#eaedf0}.axis{stroke:#8c959f}.w{stroke:#1b1f24;stroke-width:1.2;opacity:.65}
.legend span span{display:inline-block;width:.8em;height:.8em;margin:0 .35em 0 .9em}
polyline{fill:none!important;stroke-width:2}
.s0{fill:#4c78a8;stroke:#4c78a8;background:#4c78a8}.s1{fill:#72b7b2;stroke:#72b7b2;background:#72b7b2}
.s2{fill:#eeca3b;stroke:#eeca3b;background:#eeca3b}.s3{fill:#e45756;stroke:#e45756;background:#e45756}
"""


def write_page(path: Path, result: Json) -> None:
    """result: as `Result.as_dict` gives it."""
    path.write_text(render(result), encoding="utf-8")


def render(result: Json) -> str:
    drafts = (_by_position, _by_category, _changes, _lengths) if result["lengths"] else ()
    sections = (
        _head,
        *drafts,
        _drift,
        _by_layer,
        _first_differences,
        _about,
    )
    body = "\n".join(section(result) for section in sections)
    data = json.dumps(result, ensure_ascii=False).replace("</", "<\\/")
    title = escape(f"{result['sides']['bundle']['name']}: fidelity")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n{body}\n"
        f'<script type="application/json" id="result">{data}</script>\n</body></html>\n'
    )


def _head(result: Json) -> str:
    ours, theirs = result["sides"]["bundle"], result["sides"]["reference"]
    rows = [
        [name, *(_shown(key, side[key]) for side in (theirs, ours))]
        for name, key in (
            ("name", "name"),
            ("target", "target_precision"),
            ("target, size", "target_bytes"),
            ("draft", "draft_precision"),
            ("draft, size", "draft_bytes"),
        )
    ]
    failed = "<br>".join(map(escape, result["failures"]))
    failures = f'<p class="bad">{failed}</p>' if failed else ""
    found = "".join(f"<li>{escape(text)}</li>" for text in result["findings"])
    return (
        f"<h1>What {escape(ours['name'])} makes of {escape(theirs['name'])}</h1>"
        f'<p class="say" id="recommendation">{escape(result["recommendation"])}</p>{failures}'
        f'<ul id="findings">{found}</ul>{_table(["", "reference", "bundle"], rows)}'
    )


def _shown(key: str, value: str | int) -> str:
    return f"{int(value) / 1e6:,.1f} MB" if key.endswith("_bytes") else str(value)


def _by_position(result: Json) -> str:
    parts = ["<h2>Acceptance by position in a round</h2>"]
    parts.append(
        '<p class="note">Of drafts that were reached; expected Σ min(p, q), 95 % by prompts. '
        "Rounds begin at the same places of the reference's text for all pairs.</p>"
    )
    for temperature in _temperatures(result["positions"]):
        rows = [r for r in result["positions"] if r["temperature"] == temperature]
        labels = [str(r["position"]) for r in rows]
        series = _pairs(rows, lambda row, key: row["acceptance"][key])
        parts.append(f"<p>Temperature {escape(str(temperature))}</p>")
        parts.append(plot(f"position-{temperature}", frame_for(labels, series), series, lines))
    return "".join(parts)


def _by_category(result: Json) -> str:
    parts = ["<h2>Acceptance by category</h2>"]
    parts.append('<p class="note">Mean Σ min(p, q) over the reference\'s text.</p>')
    for temperature in _temperatures(result["cells"]):
        rows = [c for c in result["cells"] if c["temperature"] == temperature]
        labels = [r["category"] for r in rows]
        series = _pairs(rows, lambda row, key: row["acceptance"][key])
        parts.append(f"<p>Temperature {escape(str(temperature))}</p>")
        parts.append(plot(f"category-{temperature}", frame_for(labels, series), series, bars))
    return "".join(parts)


def _changes(result: Json) -> str:
    rows = [c for c in result["cells"] if c["category"] == ALL]
    labels = [d.name.replace(" with the ", ", ") for d in DIFFERENCES]
    values = [_value(rows[-1]["differences"][d.name]) for d in DIFFERENCES]
    whole = Series(name="change", color="s0", values=tuple(values))
    by_category = [c for c in result["cells"] if c["temperature"] == rows[-1]["temperature"]]
    changes = tuple(_value(c["differences"]["both"]) for c in by_category)
    both = Series(name="change, both", color="s3", values=changes)
    names = [c["category"] for c in by_category]
    return (
        "<h2>Change of acceptance, bundle − reference</h2>"
        '<p class="note">All temperatures, 95 % by prompts: first what target and draft each '
        "change, then both together by category.</p>"
        f"{plot('changes', frame_for(labels, [whole]), [whole], points)}"
        f"{plot('changes-by-category', frame_for(names, [both]), [both], points)}"
    )


def _lengths(result: Json) -> str:
    speeds = {str(s["temperature"]): s for s in result["speeds"]}
    rows = []
    for row in result["lengths"]:
        for pair in PAIRS:
            speed, free = speeds.get(str(row["temperature"])), row["free"][pair.key]
            rate = speed["measured"][pair.key] if speed else None
            rows.append(
                [
                    str(row["temperature"]),
                    f"{pair.target} × {pair.draft}",
                    f"{row['predicted'][pair.key]:.2f}",
                    _number(row["rounds"][pair.key], ".2f"),
                    f"{row['realised'][pair.key]:.2f}",
                    "–" if free is None else f"{free:.2f}",
                    f"{rate['tokens_per_s']:.1f} (k = {rate['k']})" if rate else "–",
                ]
            )
    head = ["temperature", "target × draft", "predicted", "rounds", "realised", "own text"]
    return (
        f"<h2>Mean acceptance length at k = {result['settings']['k']}, and speed</h2>"
        '<p class="note">Predicted from the mean acceptance alone; expected and realised over the '
        "rounds; of texts that the pair wrote itself. Speed at the best k, by the latency profiles "
        "that the bundles were built with.</p>"
        f"{_table([*head, 'tokens/s'], rows)}"
    )


def _drift(result: Json) -> str:
    rows = []
    for cell in result["cells"]:
        drift, margin = cell["drift"], cell["drift"]["median_flip_margin"]
        rows.append(
            [
                f"{cell['temperature']}, {cell['category']}",
                str(cell["tokens"]),
                _number(drift["kl"], ".4f"),
                _number(drift["tv"], ".4f"),
                _number(drift["flip_rate"], ".1%"),
                "–" if margin is None else f"{margin:.3f}",
                f"{drift['perplexity_bundle']:.3f}",
                f"{drift['perplexity_reference']:.3f}",
            ]
        )
    head = ["temperature, category", "tokens", "KL", "TV", "top-1 flips", "median margin"]
    return (
        "<h2>Drift of the target</h2>"
        '<p class="note">A token of the reference\'s text, both targets at temperature 1; KL in '
        "nats; the margin is the reference's top-2 lead where the likeliest token differs.</p>"
        f"{_table([*head, 'perplexity', 'reference'], rows)}"
    )


def _by_layer(result: Json) -> str:
    note = (
        "KL from the reference with the weights of one linear layer exchanged, added up by decoder "
        "layer. Rounding of activations is not in it."
    )
    return (
        f'<h2>Drift by layer</h2><p class="note">{note}</p>'
        f"{_layers(result['layers'], 'target', 'layers')}"
        f"{_layers(result['draft_layers'], 'draft', 'draft-layers')}"
    )


def _layers(layers: Json, model: str, name: str) -> str:
    if not layers["layers"]:
        return f'<p class="note">The {model}\'s were not measured: {escape(layers["skipped"])}.</p>'
    totals: dict[str, float] = {}
    for layer in layers["layers"]:
        totals[layer["group"]] = totals.get(layer["group"], 0.0) + layer["kl"]
    values = tuple(Value(value=kl) for kl in totals.values())
    series = [Series(name="KL", color="s0", values=values)]
    worst = sorted(layers["layers"], key=lambda layer: -layer["kl"])[:10]
    rows = [[w["name"], f"{w['kl']:.5f}", _error(w["weight_error"])] for w in worst]
    return (
        f"<p>The {model}, on {layers['tokens']} tokens</p>"
        f"{plot(name, frame_for(list(totals), series), series, bars)}"
        f"{_table([f'layers of the {model} that cost most', 'KL', 'weight error'], rows)}"
    )


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def _first_differences(result: Json) -> str:
    rows = [
        [d["prompt"], str(d["text_tokens"]), str(d["position"]), repr(d["reference"]),
         repr(d["bundle"]), f"{d['margin']:.3f}"]
        for d in result["first_differences"]
        if d["position"] is not None
    ]  # fmt: skip
    whole = len(result["first_differences"])
    head = ["prompt", "tokens", "first different", "reference", "bundle", "margin"]
    return (
        "<h2>Greedy text</h2>"
        f"<p>{whole - len(rows)} of {whole} texts are the same to their ends.</p>"
        f"{_table(head, rows) if rows else ''}"
    )


def _about(result: Json) -> str:
    about = {"settings": result["settings"], "machine": result["machine"]}
    skipped = ", ".join(result["skipped"]) or "none"
    return (
        "<h2>How this was measured</h2>"
        f'<p class="note">{escape(json.dumps(about, ensure_ascii=False))}</p>'
        f'<p class="note">Prompts left out, too long: {escape(skipped)}.</p>'
    )


def _temperatures(rows: Sequence[Json]) -> list[Any]:
    return list(dict.fromkeys(row["temperature"] for row in rows))


def _pairs(rows: Sequence[Json], of: Callable[[Json, str], Json | None]) -> list[Series]:
    return [
        Series(
            name=f"{pair.target} × {pair.draft}",
            color=f"s{i}",
            values=tuple(_value(of(row, pair.key)) for row in rows),
        )
        for i, pair in enumerate(PAIRS)
    ]


def _value(found: Json | None) -> Value | None:
    return None if found is None else Value(**found)


def _number(found: Json | None, form: str) -> str:
    return "–" if found is None else format(found["value"], form)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines_ = ("".join(f"<td>{escape(text)}</td>" for text in row) for row in rows)
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{line}</tr>' for line in lines_)}</table>"
