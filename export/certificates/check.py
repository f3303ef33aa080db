"""All certificates of one bundle, stored with it.

`reports/` lies outside the manifest's hashes, so a check may be run again anywhere; what it writes
names the machine and the versions that it ran on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from runtime.bundle import Bundle
from runtime.decoder import Decoder
from runtime.engine import load_rounds
from runtime.errors import BuildError
from runtime.executor import EngineOptions
from runtime.text import Text

from ..profile import hardware, versions
from . import contract, frequency, greedy, law, tree_law
from .report import Certificate, skipped
from .target_rows import TargetRows
from .texts import library_texts

Progress = Callable[[str], None]
REPORT = "reports/certificates.json"
PROMPT_TOKENS = 20
TREE_PROMPTS = 20  # that show how much a row's margin moves among a tree's
SAMPLED_PROMPT_TOKENS = 129  # a whole chunk that is read once, and the row behind it


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is tried: greedy prompts, and sampled answers for each sampling."""

    prompts: int = 200
    samples: int = 250
    spin: bool = True  # as in EngineOptions

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("samples", 50)):
            value = getattr(self, name)
            if value < least:
                raise BuildError(f"--{name}: received {value}. Expected at least {least}.")


def check(
    path: Path, effort: Effort | None = None, progress: Progress = lambda _: None
) -> list[Certificate]:
    """Run every certificate, write them to REPORT, return them."""
    bundle = Bundle.load(path)
    start = perf_counter()
    found = []
    for run in _certificates(bundle, effort or Effort(), progress):
        found.append(replace(run, seconds=perf_counter() - start))
        start = perf_counter()
    _write(bundle, found)
    return found


def _certificates(bundle: Bundle, effort: Effort, progress: Progress) -> Iterator[Certificate]:
    progress("contract")
    yield contract.certify(bundle)
    yield law.certify(bundle, lambda text: progress(f"law: {text}"))
    if bundle.manifest.limits.max_tree_nodes:
        yield tree_law.certify(lambda text: progress(f"tree law: {text}"))
    if bundle.manifest.draft is None:
        for other in (greedy, frequency):
            yield skipped(other.NAME, other.CLAIM, "this bundle has no draft")
        return
    limits = bundle.manifest.limits
    rows = TargetRows(
        load_rounds(bundle.path, bundle.manifest, EngineOptions(spin=effort.spin)),
        limits.max_context,
    )
    prompts = greedy_prompts(bundle, effort.prompts)
    k = min(2, limits.max_draft_tokens)
    of_greedy = greedy.certify(
        rows, prompts, k, lambda done: progress(f"greedy: {done} of {len(prompts)} prompts")
    )
    yield of_greedy
    noise = of_greedy.figures["noise"]
    if rows.rounds.brancher is not None:
        noise = max(noise, greedy.tree_noise(rows, prompts[:TREE_PROMPTS]))
    with Decoder.load(bundle.path, verify=False, spin=effort.spin) as decoder:
        yield frequency.certify(
            decoder,
            rows,
            sampled_prompt(bundle),
            effort.samples,
            lambda text: progress(f"frequency: {text}"),
            noise=noise,
        )


def greedy_prompts(bundle: Bundle, count: int) -> list[list[int]]:
    """The beginnings of real texts; a small context takes shorter ones."""
    room = bundle.manifest.limits.max_context - greedy.TOKENS - 2
    length = max(1, min(PROMPT_TOKENS, room // 2))
    encode = _encoder(bundle)
    encoded = (encode(text)[:length] for text in library_texts())
    chosen: list[list[int]] = []
    for tokens in encoded:
        if len(chosen) == count:
            break
        if tokens and tokens not in chosen:
            chosen.append(tokens)
    if len(chosen) < count:
        raise BuildError(
            f"--prompts: received {count}. Expected at most {len(chosen)}: this Python's library "
            "describes no more."
        )
    return chosen


def sampled_prompt(bundle: Bundle) -> list[int]:
    """One text, long enough for a chunk that all answers share where the context has room."""
    room = bundle.manifest.limits.max_context - frequency.TOKENS - max(frequency.DRAFT_TOKENS) - 2
    length = min(SAMPLED_PROMPT_TOKENS, room)
    encode = _encoder(bundle)
    tokens: list[int] = []
    for text in library_texts():
        tokens += encode(text)
        if len(tokens) >= length:
            break
    return tokens[:length]


def _encoder(bundle: Bundle) -> Callable[[str], list[int]]:
    manifest = bundle.manifest
    text = Text(bundle.tokenizer_path, None, manifest.bos_token_id, manifest.eos_token_ids)
    return lambda words: [t % manifest.target.vocab_size for t in text.encode(words)]


def _write(bundle: Bundle, found: Sequence[Certificate]) -> None:
    """Whole or not at all."""
    target = bundle.path / REPORT
    target.parent.mkdir(exist_ok=True)
    report = {
        "hardware": hardware(),
        "versions": versions(),
        "target_sha256": bundle.manifest.target.sha256,
        "claim": "with respect to the target as built; its drift from the checkpoint is reported "
        "by the build's gates and by `python -m calibration compare`",
        "certificates": [one.as_dict() for one in found],
    }
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    partial.replace(target)
