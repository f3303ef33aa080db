"""Measure what each part of a round costs on this machine: the latency model of the bundle.

Interleaved, medians: one part is never timed while the machine is in another mood than the rest.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

from runtime.engine import load_rounds
from runtime.executor import EngineOptions
from runtime.manifest import Manifest
from runtime.round import Rounds
from runtime.sampling import SamplingParams
from runtime.uniforms import uniform_table

REPEATS = 15
CONTEXT = 256


def measure(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The contents of `reports/latency.json` for the bundle (still unnamed) at `path`."""
    rounds = load_rounds(path, manifest, EngineOptions())
    rounds.buffers.set_sampling(SamplingParams())
    limits = manifest.limits
    context = min(CONTEXT, limits.max_context // 2)
    tokens = [1 + i % 7 for i in range(context)]
    uniforms = uniform_table(0, limits.max_context + 1)
    rounds.prefill(tokens[:-1], uniforms)
    samples = _sample(rounds, tokens, limits.max_draft_tokens, uniforms)
    median = {part: statistics.median(times) for part, times in samples.items()}
    k = limits.max_draft_tokens
    return {
        "hardware": hardware(),
        "versions": dict(manifest.versions),
        "context": context,
        "verify_s": {str(n): median["verify", n] for n in range(1, k + 2)},
        "accept_s": {str(n): median["accept", n] for n in range(k + 1)},
        "draft_s": median.get(("draft", 1), 0.0),
        "draft_catch_up_s": median.get(("draft", 2), 0.0),
        "overhead_s": max(0.0, median["round", 0]),
    }


def _sample(
    rounds: Rounds, tokens: list[int], most: int, uniforms: Any
) -> dict[tuple[str, int], list[float]]:
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    for repeat in range(REPEATS + 2):
        kept = samples if repeat >= 2 else defaultdict(list)  # the first two warm up
        for k in range(most + 1):
            _one_round(rounds, tokens, k, uniforms, kept)
        if rounds.drafter:
            _draft_steps(rounds, tokens, kept)
    return samples


def _one_round(rounds: Rounds, tokens: list[int], k: int, uniforms: Any, kept: Any) -> None:
    """Verify and accept behind a draft that is never read: their cost doesn't depend on it."""
    buffers = rounds.buffers
    start = perf_counter()
    buffers.set_last(tokens)
    buffers.set_uniforms(uniforms, len(tokens), k)
    rounds.target.length = len(tokens) - 1
    verify_s = rounds.target.verify(k + 1)
    accept_s = rounds.accept.decide(k)
    outside = perf_counter() - start - verify_s - accept_s
    kept["verify", k + 1].append(verify_s)
    kept["accept", k].append(accept_s)
    kept["round", 0].append(outside)
    rounds.rollback(len(tokens))


def _draft_steps(rounds: Rounds, tokens: list[int], kept: Any) -> None:
    assert rounds.drafter is not None
    rounds.drafter.rollback(len(tokens) - 1)
    rounds.drafter.propose(tokens, 1)  # catches up
    for behind in (1, 2):
        rounds.drafter.rollback(len(tokens) - behind)
        kept["draft", behind].append(rounds.drafter.propose(tokens, 1))


def hardware() -> str:
    """Processor name and cores, as reports name the machine that they were measured on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    """Versions of everything that shaped the bundle."""
    names = ("outrider", "onnxruntime", "torch", "transformers", "onnx", "onnxscript", "onnx-ir")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
