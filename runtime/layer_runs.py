"""Sets of layers as runs of consecutive ones: how graphs leave them out and people write them."""

from __future__ import annotations

from collections.abc import Iterable


def runs(layers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending layers as first and last of each run: 3, 4, 5, 9 → (3, 5), (9, 9)."""
    found: list[tuple[int, int]] = []
    for layer in layers:
        if found and layer == found[-1][1] + 1:
            found[-1] = (found[-1][0], layer)
        else:
            found.append((layer, layer))
    return found


def as_text(layers: Iterable[int]) -> str:
    """3, 4, 5, 9 → 3-5,9."""
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs(layers))
