"""What is inside a bundle: as tables for people, as JSON for programs. Both say the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from runtime.bundle import Bundle
from runtime.latency import LatencyProfile
from runtime.manifest import FileRecord, Manifest, ModelCard

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)  # chances that one drafted token is accepted


def as_json(bundle: Bundle) -> dict[str, Any]:
    """The manifest, and what follows from it and from the reports."""
    manifest = bundle.manifest
    return asdict(manifest) | {
        "path": str(bundle.path),
        "total_bytes": sum(record.bytes for record in manifest.files.values()),
        "kv_cache_bytes": _cache_bytes(manifest),
        "chat_template": bundle.chat_template is not None,
        "latency": bundle.latency,
        "predicted_speedup": predicted_speedup(bundle),
    }


def describe(bundle: Bundle) -> list[RenderableType]:
    """Tables: the bundle, its models, gates, files and the latency profile."""
    tables = [_summary(bundle), _models(bundle.manifest), _gates(bundle.manifest)]
    tables.append(_files(bundle.manifest.files))
    speedup = predicted_speedup(bundle)
    if speedup:
        tables.append(_latency(speedup))
    return list(tables)


def predicted_speedup(bundle: Bundle) -> list[dict[str, float]]:
    """Per k: the round's cost and the speed-up over plain decoding at several acceptances.

    With acceptance a of each drafted token, independent of the others, a round commits
    1 + a + … + a^k tokens (Leviathan et al., equation 1). Empty without a latency profile.
    """
    if not bundle.latency or bundle.manifest.draft is None:
        return []
    profile = LatencyProfile.from_report(bundle.latency)
    largest = bundle.manifest.limits.max_draft_tokens
    return [_prediction(profile, k) for k in range(1, largest + 1)]


def _prediction(profile: LatencyProfile, k: int) -> dict[str, float]:
    plain_s, round_s = profile.round_s(0), profile.round_s(k)
    row = {"k": float(k), "round_s": round_s}
    for acceptance in ACCEPTANCES:
        committed = sum(acceptance**i for i in range(k + 1))
        full_accept_s = acceptance**k * profile.read_s(2)  # the draft then reads one token more
        row[f"speedup_at_{acceptance}"] = committed * plain_s / (round_s + full_accept_s)
    return row


def _summary(bundle: Bundle) -> Table:
    manifest, limits = bundle.manifest, bundle.manifest.limits
    total = sum(record.bytes for record in manifest.files.values())
    rows = {
        "backend": manifest.backend,
        **_engines(manifest),
        "drafter": f"{manifest.draft.kind}: {manifest.draft.name}" if manifest.draft else "none",
        "versions": ", ".join(f"{k} {v}" for k, v in sorted(manifest.versions.items())),
        "max batch": str(limits.max_batch),
        "max context": f"{limits.max_context} tokens",
        "max draft tokens": str(limits.max_draft_tokens),
        "size on disk": _bytes(total),
        "KV caches": f"{_bytes(_cache_bytes(manifest))} at batch {limits.max_batch}",
        "begin token": str(manifest.bos_token_id),
        "end tokens": ", ".join(map(str, manifest.eos_token_ids)) or "none",
        "chat template": "yes" if bundle.chat_template is not None else "no",
        "tokenizer": manifest.tokenizer_sha256[:12],
    }
    return _table(str(bundle.path), ("", ""), rows.items())


def _engines(manifest: Manifest) -> dict[str, str]:
    """What the plans are for, where there are any."""
    card = manifest.engines
    if card is None:
        return {}
    targets = ", ".join(f"SM{one}" for one in card.compute_capabilities)
    return {
        "engines": f"{card.package} {card.version}",
        "compute capabilities": targets or "all that the library builds for, or the GPU at hand",
        "draft runs on": card.draft_backend,
    }


def _models(manifest: Manifest) -> Table:
    """A column each: side by side they fit a terminal of 80 characters."""
    cards = {"target": manifest.target, "draft": manifest.draft_model}
    there = {role: _card(card) for role, card in cards.items() if card is not None}
    rows = [(what, *(card[what] for card in there.values())) for what in there["target"]]
    return _table("Models", ("", *there), rows)


def _card(card: ModelCard) -> dict[str, str]:
    cache = card.cache
    return {
        "name": f"{card.name}@{card.revision[:7]}" if card.revision else card.name,
        "type": card.model_type,
        "precision": card.precision,
        "parameters": f"{card.parameters / 1e6:,.1f} M",
        "vocabulary": str(card.vocab_size),
        "cache": f"{cache.layers} × {cache.kv_heads} × {cache.head_dim} {cache.dtype}",
        "sha256": card.sha256[:12],
    }


def _gates(manifest: Manifest) -> Table:
    rows = [(g.name, g.status, g.reason or _figures(g.figures)) for g in manifest.gates]
    return _table("Gates", ("gate", "status", "figures"), rows)


def _figures(figures: Mapping[str, float | int | str]) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
    )


def _files(records: Mapping[str, FileRecord]) -> Table:
    rows = [(n, _bytes(r.bytes), r.sha256[:12]) for n, r in sorted(records.items())]
    return _table("Files", ("file", "size", "sha256"), rows)


def _latency(speedup: list[dict[str, float]]) -> Table:
    columns = ("k", "round, ms", *(f"× at {a:g}" for a in ACCEPTANCES))
    rows = [
        (
            f"{row['k']:.0f}",
            f"{1000 * row['round_s']:.2f}",
            *(f"{row[f'speedup_at_{a}']:.2f}" for a in ACCEPTANCES),
        )
        for row in speedup
    ]
    return _table("Predicted speed-up, by acceptance of a drafted token", columns, rows)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _cache_bytes(manifest: Manifest) -> int:
    cards = [card for card in (manifest.target, manifest.draft_model) if card is not None]
    return sum(card.cache.bytes(manifest.limits.max_batch) for card in cards)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
