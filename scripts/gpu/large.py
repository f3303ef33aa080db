"""Times of a model of the size that people run, and what they make of an acceptance.

The weights may be random, since times hang on sizes alone (`scripts/random_checkpoint.py`). Such a
model's drafts are accepted by chance; how often is therefore set by hand here, position by position
alike, and the expected length of a round is (1 - a^(k + 1)) / (1 - a) tokens (Leviathan et al.
2023, equation 1).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from .steps import Check, Skipped, bandwidth, opening, plans, second_start, times

Figures = dict[str, Any]
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
_STEPS = (plans, opening, times, bandwidth, second_start)


def measure(check: Check) -> Figures:
    """check: of the large bundle. Figures of each step, and tokens/s by context."""
    found: Figures = {}
    try:
        for step in _STEPS:
            try:
                found[step.__name__] = step(check)
            except Skipped as reason:
                found[step.__name__] = {"skipped": str(reason)}
    finally:
        check.close()
    speeds = {context: by_acceptance(ms) for context, ms in found["times"].items() if ms != str(ms)}
    return found | {"tokens_per_s": speeds}


def by_acceptance(ms: Figures) -> Figures:
    """Of one context's times: plain decoding, then each number of drafts at each acceptance, with
    what it is of plain decoding."""
    plain = 1e3 / (ms["verify 1"] + ms["accept 0"])
    found: Figures = {"plain": plain}
    for name, round_ms in ms.items():
        if (of_round := re.fullmatch(r"captured round (\d+)", name)) is None:
            continue
        k = int(of_round[1])
        for acceptance in ACCEPTANCES:
            rate = 1e3 * expected_length(acceptance, k) / round_ms
            shown = f"{rate:.4g} ({rate / plain:.2f} x)"
            found.setdefault(f"acceptance {acceptance:g}", {})[f"k = {k}"] = shown
    return found


def expected_length(acceptance: float, k: int) -> float:
    """Tokens a round of k drafts."""
    return float(sum(acceptance**i for i in range(k + 1)))


def of_bundle(check: Check) -> Figures:
    """The step: a bundle of 7 to 8 billion parameters, on its own, since it needs the memory."""
    if check.large_bundle is None:
        raise Skipped("no --large-bundle was given")
    check.close()
    return measure(replace(check, path=check.large_bundle, onnx_bundle=None, large_bundle=None))
