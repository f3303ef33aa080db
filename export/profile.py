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

from runtime.bench.prompts import Prompt, load_prompts
from runtime.drafter import Drafter, Propose
from runtime.engine import load_rounds
from runtime.errors import InvalidRequest
from runtime.executor import EngineOptions
from runtime.manifest import Manifest
from runtime.round import Rounds
from runtime.sampling import SamplingParams
from runtime.text import Text
from runtime.uniforms import uniform_table

REPEATS = 15
CONTEXT = 256
ACCEPTANCE_ROUNDS = 24  # a prompt
BEHIND = 8  # tokens that a draft of other tokens has to catch up with, to see what that costs


def measure(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The contents of `reports/latency.json` for the bundle (still unnamed) at `path`."""
    rounds = load_rounds(path, manifest, EngineOptions())
    rounds.buffers.sampling.begin(SamplingParams(), ())
    limits = manifest.limits
    context = min(CONTEXT, limits.max_context // 2)
    tokens = [1 + i % 7 for i in range(context)]
    uniforms = uniform_table(0, limits.max_context + 1)
    rounds.prefill(tokens[:-1], uniforms)
    samples = _sample(rounds, tokens, limits.max_draft_tokens, uniforms)
    if manifest.retokenized:
        samples |= translated_steps(rounds, _spoken(path, manifest, context))
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
        "draft_start_s": median.get(("start", 0), 0.0),
        "overhead_s": max(0.0, median["round", 0]),
        "acceptance": acceptance(rounds, path, manifest, uniforms) if rounds.drafter else None,
    }


def acceptance(rounds: Rounds, path: Path, manifest: Manifest, uniforms: Any) -> float | None:
    """The share of first drafts accepted on the shipped prompts, greedy: where a planner begins."""
    text, found = _text(path, manifest), list[int]()
    for prompt in load_prompts([], ["shipped"], None)[::3]:
        found += _accept_some(rounds, encoded(text, prompt), manifest, uniforms)
    return sum(found) / len(found) if found else None


def _text(path: Path, manifest: Manifest) -> Text:
    special = manifest.bos_token_id, manifest.eos_token_ids
    template = path / "chat_template.jinja"
    source = template.read_text(encoding="utf-8") if template.exists() else None
    return Text(path / "tokenizer.json", source, *special)


def _spoken(path: Path, manifest: Manifest, count: int) -> list[int]:
    """Up to `count` tokens of the shipped prompts: a draft of other tokens reads text alone."""
    text, tokens = _text(path, manifest), list[int]()
    for prompt in load_prompts([], ["shipped"], None):
        tokens += encoded(text, prompt)
        if len(tokens) >= count:
            break
    return [token % manifest.target.vocab_size for token in tokens[:count]]


def encoded(text: Text, prompt: Prompt) -> list[int]:
    """Through the chat template where the model has one that takes these messages."""
    if isinstance(prompt.content, str):
        return text.encode(prompt.content)
    try:
        return text.encode_chat(prompt.content)
    except InvalidRequest:
        return text.encode("\n\n".join(str(m["content"]) for m in prompt.content))


def _accept_some(rounds: Rounds, prompt: list[int], manifest: Manifest, uniforms: Any) -> list[int]:
    """One draft a round behind `prompt`, up to an end token: for each whether it was accepted."""
    found: list[int] = []
    tokens = [t % manifest.target.vocab_size for t in prompt]
    most = manifest.limits.max_context - ACCEPTANCE_ROUNDS * 2 - 2
    if not tokens or len(tokens) > most:
        return found
    tokens += rounds.prefill(tokens, uniforms).tokens
    for _ in range(ACCEPTANCE_ROUNDS):
        if tokens[-1] in manifest.eos_token_ids:
            break
        propose = drafting(rounds.drafter, tokens) if rounds.drafter else None
        outcome = rounds.run(tokens, 1, uniforms, propose)
        tokens += outcome.tokens
        found += [outcome.num_accepted] if outcome.num_drafted else []
    return found


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
    buffers.set_drawn(k)
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
    propose = drafting(rounds.drafter, tokens)
    propose(tokens, 1, rounds.constraint)  # catches up
    for behind in (1, 2):
        rounds.drafter.rollback(len(tokens) - behind)
        proposal = propose(tokens, 1, rounds.constraint)
        kept["draft", behind].append(proposal.seconds)


def translated_steps(rounds: Rounds, tokens: list[int]) -> dict[tuple[str, int], list[float]]:
    """Of a draft whose text is translated: the seconds of a token more, and of the first besides.

    It says more tokens of its own than it drafts, and how many depends on both tokenizers.
    """
    assert rounds.drafter is not None
    drafter, most = rounds.drafter, rounds.buffers.max_draft_tokens
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    drafter.rollback(0)
    propose = drafting(drafter, tokens)
    tokens = _cut_where_it_drafts(propose, rounds, tokens)
    for repeat in range(REPEATS + 2):
        kept = samples if repeat >= 2 else defaultdict(list)
        propose(tokens[:-BEHIND], 1, rounds.constraint)
        unread = max(one.unread for one in drafter.offer(tokens, 1).all)
        behind, one, many = (propose(tokens, k, rounds.constraint) for k in (1, 1, most))
        more = many.num_drafted - one.num_drafted
        each_s = max(0.0, many.seconds - one.seconds) / more if more > 0 else one.seconds
        read_s = max(0.0, behind.seconds - one.seconds) / max(1, unread - 1)
        kept["draft", 1].append(each_s)
        kept["draft", 2].append(each_s + read_s)
        kept["start", 0].append(max(0.0, one.seconds - each_s))
    drafter.rollback(0)
    return samples


def _cut_where_it_drafts(propose: Propose, rounds: Rounds, tokens: list[int]) -> list[int]:
    """`tokens` without the last few, if a text cut behind those can't be gone on with."""
    assert rounds.drafter is not None
    for end in range(len(tokens), max(BEHIND, len(tokens) - BEHIND), -1):
        if propose(tokens[:end], 2, rounds.constraint).num_drafted == 2:
            return tokens[:end]
        rounds.drafter.rollback(0)
    return tokens


def drafting(drafter: Drafter, tokens: list[int]) -> Propose:
    """What drafts, of a drafter that looks up, too: only that takes time and is judged by rounds.

    A lookup alone is timed as it is.
    """
    offers = drafter.offer(tokens, 1).all
    found = [offer.propose for offer in offers if offer.propose and not offer.known]
    return found[0] if found else drafter.propose


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
