"""The steps of a GPU check, in the order in which they settle things; each returns its figures.

A step raises `Skipped` with its reason where it doesn't apply, and anything else where it fails.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.engine import open_graphs
from runtime.oracle import ROWS, Oracle
from runtime.oracle_runs import accept_decisions, draft_ids
from runtime.round import Rounds
from runtime.sampling import SamplingParams
from runtime.target import PREFILL_CHUNK
from runtime.tree_shape import parse_tree
from runtime.uniforms import uniform_table
from runtime.whole_chain import prepared
from runtime.whole_rounds import WholeRounds

from .launches import counted
from .subject import OpenGraphs, Subject

Figures = dict[str, Any]
# Of fp16 against the f32 oracle with the same weights: 11 bits over some dozen layers.
MOST_ERROR = 0.05
# Where inputs are rounded to 8 bits, a value that fp16 moves over a tie moves by a whole step: 0.12
# was seen of typed graphs on the CPU.
MOST_ERROR_8_BITS = 0.35
ROUNDED_INPUTS = ("int8-smoothquant", "int8-smoothquant-bf16", "fp8", "fp8-bf16")
ROUNDS = 200
# Of an EAGLE head's rounds: one that is launched whole reads k + 1 pairs at once, the steps read
# the new ones alone. fp16 rounds otherwise then, and a choice near a tie may fall elsewhere.
MOST_DIFFERING = 0.02
REPEATS = 20
CONTEXTS = (256, 4096)


class Skipped(Exception):
    """Why a step doesn't apply here."""


class Failed(Exception):
    """What a step found wrong."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """What all steps share; `subject` is opened by the first step that can."""

    path: Path
    onnx_bundle: Path | None = None
    large_bundle: Path | None = None
    open_with: OpenGraphs = open_graphs

    def __post_init__(self) -> None:
        object.__setattr__(self, "_subject", None)

    @property
    def subject(self) -> Subject:
        if self._subject is None:  # type: ignore[attr-defined]
            object.__setattr__(self, "_subject", Subject(self.path, self.open_with))
        return self._subject  # type: ignore[attr-defined,no-any-return]

    def close(self) -> None:
        """What is asked afterwards opens it anew."""
        if self._subject is not None:  # type: ignore[attr-defined]
            self._subject.close()  # type: ignore[attr-defined]
            object.__setattr__(self, "_subject", None)


def machine(check: Check) -> Figures:
    """The GPU, its driver, and the versions that everything below was measured with."""
    import platform
    from importlib import metadata

    from runtime.cuda.driver import Driver

    driver = Driver()
    gpu = driver.gpu()
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    kept = ("numpy", "cuda-bindings", "tensorrt", "tensorrt_rtx_cu13", "onnxruntime-gpu")
    return {
        "gpu": gpu.name,
        "compute_capability": gpu.compute_capability,
        "driver": driver.call("cudaDriverGetVersion"),
        "cuda_runtime": driver.call("cudaRuntimeGetVersion"),
        "free_bytes": driver.free_bytes(),
        "python": platform.python_version(),
        **{name: found[name] for name in kept if name in found},
    }


def plans(check: Check) -> Figures:
    """Whether each plan is for this GPU, with the library's diagnostic bits."""
    from runtime.bundle import Bundle
    from runtime.cuda.plan import Library, mapped

    card = Bundle.load(check.path, verify=False).manifest.engines
    if card is None:
        raise Skipped("a bundle of ONNX graphs")
    library = Library(card)
    ask = getattr(library.runtime, "get_engine_validity", None)
    found: Figures = {
        "built_for": list(card.compute_capabilities) or "all",
        "version": card.version,
    }
    for plan in sorted((check.path / "engines").glob("*.plan")):
        if ask is None:
            found[plan.stem] = "the library doesn't tell"
            continue
        with mapped(plan) as data:
            validity, bits = ask(data)
        found[plan.stem] = f"{validity.name}, diagnostics {int(bits):#x}"
    if any(str(value).startswith("INVALID") for value in found.values()):
        raise Failed(f"received {found}. Expected plans that this GPU can run")
    return found


def opening(check: Check) -> Figures:
    """Deserialize every plan, allocate, bind; then the target's first step."""
    return {**_started(check), "graphs": sorted(check.subject.executors)}


def _started(check: Check) -> Figures:
    start = time.perf_counter()
    step = check.subject.rounds.target
    opened = time.perf_counter()
    step.length = 0
    step.prefill([1])
    return {"seconds": opened - start, "first_step_s": time.perf_counter() - opened}


def target(check: Check) -> Figures:
    """The target's logits behind the last rows of the oracle's text."""
    subject, oracle = check.subject, Oracle.load(check.path)
    tokens = oracle.tokens.tolist()
    step = subject.rounds.target
    step.length = 0
    found = []
    for token in tokens:
        step.prefill([token])
        subject.download(subject.buffers.logits)
        found.append(subject.buffers.logits[0, 0].copy())
    return _near("target", np.stack(found)[-ROWS:], oracle.logits, _most_error(check))


def verification(check: Check) -> Figures:
    """The same rows, the last k + 1 of them in one pass."""
    subject, oracle = check.subject, Oracle.load(check.path)
    tokens, k = oracle.tokens.tolist(), subject.manifest.limits.max_draft_tokens
    rows = min(k + 1, ROWS)
    step = subject.rounds.target
    step.length = 0
    step.prefill(tokens[:-rows])
    subject.buffers.block[0, 1 : 1 + rows] = tokens[-rows:]
    step.verify(rows)
    subject.download(subject.buffers.logits)
    logits = subject.buffers.logits[0, :rows]
    return _near("verification", logits, oracle.logits[-rows:], _most_error(check))


def draft(check: Check) -> Figures:
    """The draft's q at temperature 1, one step a token; a head's, on the target's own states."""
    subject, oracle = check.subject, Oracle.load(check.path)
    if not subject.drafts or not oracle.draft_probs.size:
        raise Skipped("no draft's engine")
    buffers, drafter = subject.buffers, subject.rounds.drafter
    assert drafter is not None
    subject.rounds.begin(SamplingParams(temperature=1.0), [1])
    drafter.rollback(0)
    tokens, found = oracle.tokens.tolist(), []
    if subject.rounds.target.features is not None:
        subject.rounds.target.length = 0
        subject.rounds.target.prefill(tokens)
    for end in range(2, len(tokens) + 1):
        buffers.set_last(tokens[:end])
        drafter.propose(tokens[:end], 1, subject.rounds.constraint)
        subject.download(buffers.draft_probs)
        found.append(buffers.draft_probs[0, 0].copy())
    width = oracle.draft_probs.shape[1]
    rows = min(len(found), len(oracle.draft_probs))
    received, expected = np.stack(found)[-rows:, :width], oracle.draft_probs[-rows:]
    distance = float(0.5 * np.abs(received - expected).sum(-1).max())
    if not distance < MOST_ERROR:
        raise Failed(f"q is {distance:.3g} in total variation from the oracle's")
    return {"most_total_variation": distance, "limit": MOST_ERROR, "rows": rows}


def accept(check: Check) -> Figures:
    """Decisions and draws, exactly the CPU's."""
    subject, oracle = check.subject, Oracle.load(check.path)
    if not oracle.num_accepted.size:
        raise Skipped("the bundle drafts nothing")
    ids = draft_ids(subject.manifest.draft_vocab_size, subject.bundle.d2t)
    step = subject.rounds.accept
    accepted, tokens = accept_decisions(step, subject.buffers, ids, subject.upload)
    wrong = int((accepted != oracle.num_accepted).sum() + (tokens != oracle.next_token).sum())
    if wrong:
        raise Failed(f"{wrong} of {2 * len(accepted)} decisions differ from the oracle's")
    return {"cases": len(accepted), "accepted": int(accepted.sum())}


def aliasing(check: Check) -> Figures:
    """Every cache output shares its input's memory."""
    subject = check.subject
    if subject.device is None:
        raise Skipped("no engines")
    found: Figures = {}
    for name, executor in subject.executors.items():
        engine = executor._engine  # type: ignore[attr-defined]
        outputs = [o for o in engine.outputs if o.startswith("present")]
        aliased = [engine.engine.get_aliased_input_tensor(o) for o in outputs]
        expected = [o.replace("present", "past_key_values") for o in outputs]
        if aliased != expected:
            raise Failed(f"{name}: {aliased[:2]}… in place of {expected[:2]}…")
        found[name] = len(outputs)
    return found


def rollback(check: Check) -> Figures:
    """Verify, roll back, replay: the bits of a run that never took the wrong path."""
    subject = check.subject
    step, buffers = subject.rounds.target, subject.buffers
    rows = subject.manifest.limits.max_draft_tokens + 1

    def verified(first: int) -> np.ndarray:
        step.length = 20
        buffers.block[0, 1 : 1 + rows] = first + np.arange(rows)
        step.verify(rows)
        subject.download(buffers.logits)
        return buffers.logits[0, :rows].copy()

    step.length = 0
    step.prefill(list(range(3, 23)))
    clean = verified(5)
    verified(9)
    again = verified(5)
    if not np.array_equal(clean, again):
        raise Failed(f"logits differ by {np.abs(clean - again).max():.3g} after a rollback")
    return {"rows": rows}


def captured(check: Check) -> Figures:
    """A captured round with fresh inputs against the steps one by one, greedy and sampled."""
    subject = check.subject
    if not subject.drafts:
        raise Skipped("no draft's engine beside the target's")
    captured = subject.captured()
    figures: Figures = {"rounds": 0, "accepted": 0, "differing": 0}
    for seed, params in enumerate((SamplingParams(), SamplingParams(temperature=0.8, top_k=50))):
        _compare_rounds(subject, captured, params, seed, figures)
    figures["captured"] = [str(shape) for shape in captured.programs.captured]
    return figures


def _compare_rounds(
    subject: Subject, captured: Any, params: SamplingParams, seed: int, figures: Figures
) -> None:
    most, k = subject.manifest.limits.max_context, subject.manifest.limits.max_draft_tokens
    rounds, uniforms = subject.rounds, uniform_table(seed, most + 1)
    is_head = rounds.target.features is not None
    most_differing = MOST_DIFFERING * ROUNDS if is_head else 0
    prompt = [3 + (7 * i) % 50 for i in range(12)]
    tokens: list[int] = []
    for i in range(ROUNDS // 2):
        if not tokens or len(tokens) + k + 2 > most:
            rounds.begin(params, prompt)
            tokens = [*prompt, *rounds.prefill(list(prompt), uniforms).tokens]
            tokens += Rounds.run(rounds, tokens, 1, uniforms).tokens
            rounds.rollback(len(tokens))
        size = 1 + i % k
        inputs = prepared(rounds.drafter, tokens, size, uniforms, params)
        launched = captured.run(inputs, size) if inputs else None
        stepped = Rounds.run(rounds, tokens, size, uniforms)  # the steps, whatever `rounds` is
        if launched and launched.tokens != stepped.tokens:
            figures["differing"] += 1
            if figures["differing"] > most_differing:
                raise Failed(f"round {i}, k = {size}: {launched.tokens} and {stepped.tokens}")
        tokens = [*tokens, *stepped.tokens]
        rounds.rollback(len(tokens))
        figures["rounds"] += 1
        figures["accepted"] += stepped.num_accepted
    figures["cache_error"] = _cache_error(subject, tokens)
    if not figures["cache_error"] < MOST_ERROR:
        raise Failed(f"the caches differ from a clean run's: {figures}")


def trees(check: Check) -> Figures:
    """Rounds with a tree leave the caches of a clean run: rows are moved on the device. Of a draft
    model they are one launch each, and have the tokens of rounds that the host drives.
    """
    subject = check.subject
    limits, rounds = subject.manifest.limits, subject.rounds
    if limits.max_tree_nodes < 6 or rounds.brancher is None:
        raise Skipped("the bundle makes no trees of 6 drafts")
    shape, uniforms = parse_tree("2x2"), uniform_table(0, limits.max_context + 1, 8)
    tokens = [3 + (7 * i) % 50 for i in range(12)]
    rounds.begin(SamplingParams(temperature=0.8, top_k=50), tokens)
    tokens += rounds.prefill(list(tokens), uniforms).tokens
    figures: Figures = dict.fromkeys(("rounds", "launches", "other_tokens", "accepted"), 0)
    found: dict[str, list[float]] = {"ms": [], "ms_by_steps": [], "moved_ms": []}
    while figures["rounds"] < ROUNDS // 4 and len(tokens) + 8 < limits.max_context:
        start = time.perf_counter()
        stepped = Rounds.run_tree(rounds, tokens, shape, 6, uniforms)
        rounds.rollback(len(tokens))
        between = time.perf_counter()
        with counted(subject.device) as launches:
            outcome = rounds.run_tree(tokens, shape, 6, uniforms)
        found["ms_by_steps"].append(1e3 * (between - start))
        found["ms"].append(1e3 * (time.perf_counter() - between))
        found["moved_ms"].append(1e3 * outcome.compact_s)
        tokens += outcome.tokens
        figures["rounds"] += 1
        figures["launches"] += launches.count
        figures["other_tokens"] += outcome.tokens != stepped.tokens
        figures["accepted"] += outcome.num_accepted
    figures |= {f"median_{name}": statistics.median(times) for name, times in found.items()}
    figures["cache_error"] = _cache_error(subject, tokens)
    _check_trees(rounds, figures)
    return figures


def _check_trees(rounds: Rounds, figures: Figures) -> None:
    whole = isinstance(rounds, WholeRounds) and rounds.whole_trees is not None
    if whole and figures["launches"] != figures["rounds"]:
        raise Failed(f"not one launch a round: {figures}")
    # A draft that reads other numbers of rows may rank two that are nearly alike otherwise.
    if figures["other_tokens"] > figures["rounds"] // 10:
        raise Failed(f"tokens differ from those of the steps: {figures}")
    if not figures["cache_error"] < MOST_ERROR:
        raise Failed(f"the caches differ from a clean run's: {figures}")


def _cache_error(subject: Subject, tokens: list[int]) -> float:
    """The last row's logits behind the rows that the rounds left, against rows read anew."""
    step, found = subject.rounds.target, []
    for first in (len(tokens) - 1, 0):
        step.length = first
        for start in range(first, len(tokens), PREFILL_CHUNK):
            step.prefill(tokens[start : start + PREFILL_CHUNK])
        subject.download(subject.buffers.logits)
        found.append(subject.buffers.logits[0, 0].copy())
    return float(np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1] - found[1].mean()))


def times(check: Check) -> Figures:
    """Medians in ms, each with its copies and its wait: T(1) to T(k + 1), accept, a draft's own
    steps, whole rounds."""
    subject = check.subject
    found: Figures = {}
    for context in CONTEXTS:
        k = subject.manifest.limits.max_draft_tokens
        if context + k + 1 > subject.manifest.limits.max_context:
            found[f"context {context}"] = "beyond the bundle's context"
            continue
        found[f"context {context}"] = _times_at(subject, context, k)
    return found


def _times_at(subject: Subject, context: int, k: int) -> Figures:
    rounds, found = subject.rounds, Figures()
    rounds.begin(SamplingParams(), [1])
    rounds.target.length = context
    for rows in range(1, k + 2):
        found[f"verify {rows}"] = _median_ms(lambda rows=rows: rounds.target.verify(rows))
        rounds.target.length = context
    for drafts in (0, k):
        found[f"accept {drafts}"] = _median_ms(lambda d=drafts: rounds.accept.decide(d))
    if subject.drafts:
        found |= _round_times(subject, context, k)
    return found


def _round_times(subject: Subject, context: int, k: int) -> Figures:
    captured = subject.captured()
    tokens = [1 + i % 7 for i in range(context)]
    drafter, found = subject.rounds.drafter, Figures()
    uniforms = uniform_table(0, subject.manifest.limits.max_context + 1)
    assert drafter is not None
    drafter.rollback(0)
    for drafts in range(1, k + 1):
        inputs = prepared(drafter, tokens, drafts, uniforms, SamplingParams())
        if inputs is None:
            continue
        found[f"captured round {drafts}"] = _median_ms(
            lambda d=drafts, i=inputs: captured.run(i, d).verify_s
        )
    return found | _draft_times(subject, tokens, k)


def _draft_times(subject: Subject, tokens: list[int], k: int) -> Figures:
    """All but the last of the tokens are read."""
    drafter, constraint = subject.rounds.drafter, subject.rounds.constraint
    assert drafter is not None
    subject.buffers.set_last(tokens)
    drafter.propose(tokens, 1, constraint)

    def drafted(count: int) -> float:
        drafter.rollback(len(tokens) - 1)
        return drafter.propose(tokens, count, constraint).seconds

    return {f"draft {count}": _median_ms(lambda c=count: drafted(c)) for count in sorted({1, k})}


def bandwidth(check: Check) -> Figures:
    """A copy on the device, read and write: what moving weights can't beat."""
    subject = check.subject
    if subject.device is None or subject.manifest.engines is None:
        raise Skipped("no engines")
    memory, size = subject.device.memory, 1 << 30
    memory.require(2 * size, "two buffers to copy between")
    source, to = memory.device(size), memory.device(size)

    def copy() -> float:
        start = time.perf_counter()
        memory.on_device(to.address, source.address, size)
        subject.device.synchronize()
        return time.perf_counter() - start

    ms = _median_ms(copy)
    plan = subject.manifest.files["engines/target.plan"].bytes
    return {
        "copy_gb_s": 2 * size / ms / 1e6,
        "target_plan_bytes": plan,
        "target_plan_read_ms": plan / (2 * size) * ms,
    }


def second_start(check: Check) -> Figures:
    """Opened once more, with the kernels that the first start compiled: `opening` beside it."""
    if check.subject.device is None or check.subject.manifest.engines is None:
        raise Skipped("no engines")
    check.close()
    return _started(check)


def onnxruntime_cuda(check: Check) -> Figures:
    """A bundle for ONNX Runtime's CUDA provider, with and without its graph capture."""
    if check.onnx_bundle is None:
        raise Skipped("no --onnx-bundle was given")
    from .ort_cuda import measure

    return measure(check.onnx_bundle)


def large(check: Check) -> Figures:
    """A model of 7 to 8 billion parameters: times, and tokens/s at an acceptance set by hand."""
    from .large import of_bundle

    return of_bundle(check)


# What holds of any backend: numbers against the oracle, rollbacks, a round in other words, times.
COMMON = (opening, target, verification, draft, accept, rollback, captured, times)


def _median_ms(run: Callable[[], float]) -> float:
    for _ in range(3):
        run()
    return 1e3 * statistics.median(run() for _ in range(REPEATS))


def _most_error(check: Check) -> float:
    rounded = check.subject.manifest.target.precision in ROUNDED_INPUTS
    return MOST_ERROR_8_BITS if rounded else MOST_ERROR


def _near(what: str, received: np.ndarray, expected: np.ndarray, limit: float) -> Figures:
    norm = float(np.linalg.norm(expected - expected.mean()))
    error = float(np.linalg.norm(received - expected)) / norm
    figures: Figures = {
        "relative_error": error,
        "limit": limit,
        "top1_agreement": float((received.argmax(-1) == expected.argmax(-1)).mean()),
        "rows": len(expected),
    }
    if not error < limit:
        raise Failed(f"{what}: {figures}")
    return figures


STEPS: dict[str, Callable[[Check], Figures]] = {
    "machine": machine,
    "plans": plans,
    "opening": opening,
    "target": target,
    "verification": verification,
    "draft": draft,
    "accept": accept,
    "aliasing": aliasing,
    "rollback": rollback,
    "captured": captured,
    "trees": trees,
    "times": times,
    "bandwidth": bandwidth,
    "second start": second_start,
    "onnxruntime-cuda": onnxruntime_cuda,
    "large": large,
}
