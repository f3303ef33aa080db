"""The build: from two checkpoints to one bundle, or to a clear error and nothing left behind."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from engines.external_data import WeightStore
from runtime.bundle import Bundle
from runtime.bundle_files import record_files
from runtime.errors import OutriderError
from runtime.manifest import (
    SCHEMA,
    FileRecord,
    Gate,
    Manifest,
    ModelCard,
)
from runtime.provider_contract import PROVIDER_BACKEND
from runtime.text import Text

from . import gates
from .build_plan import BuildPlan, BuildRequest, plan_build
from .bundle_writer import BundleWriter
from .draft_plan import States, WrittenDraft, no_states
from .engine_bundle import EngineBuild, write_engines
from .gate_graph import GateGraph
from .graphs import WrittenGraph, write_accept, write_target
from .model_card import model_card
from .profile import measure, versions
from .provider_bundle import ProviderBuild, write_provider_graphs

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

GATE_TEXT = (
    "def mean(values):\n    return sum(values) / len(values)\n\n"
    "The quick brown fox jumps over the lazy dog, 42 times. Water boils at 100 degrees."
)
GATE_TOKENS = 48
LEAST_ACCEPTANCE = 0.05  # below it, a draft doesn't fit its target


def build(request: BuildRequest, progress: Progress = lambda _: None) -> Path:
    """Build a bundle; returns its path. Raises CheckpointError and BuildError.

    A failure at any point leaves no directory that loads as a bundle.
    """
    if Path(request.out).exists():  # before the slow work; the writer checks again
        BundleWriter(request.out).refuse_existing()
    plan = plan_build(request)
    with BundleWriter(request.out) as writer:
        manifest = _fill(plan, writer.directory, progress)
        if request.gate is not None:
            manifest = _gated(request, manifest, writer.directory, progress)
        progress("hashing and moving into place")
        return writer.finish(lambda files: _with_files(manifest, files))


def _gated(
    request: BuildRequest, manifest: Manifest, directory: Path, progress: Progress
) -> Manifest:
    """The manifest with the comparison's gate. Raises GateFailed."""
    assert request.gate is not None
    progress("comparing with the reference")
    bundle = Bundle.described(directory, _with_files(manifest, record_files(directory)))
    gate = request.gate.check(bundle, request.target, request.draft, progress)
    return replace(manifest, gates=(*manifest.gates, gate))


def _fill(plan: BuildPlan, directory: Path, progress: Progress) -> Manifest:
    """Write everything but the manifest; returns it with no files listed yet."""
    if plan.engines is not None:
        return _fill_engines(plan, plan.engines, directory, progress)
    if plan.provider is not None:
        return _fill_provider(plan, plan.provider, directory, progress)
    onnx = directory / "onnx"
    onnx.mkdir()
    store = WeightStore(directory=onnx)
    if plan.calibration is not None:
        _write_report(directory, "calibration", plan.calibration.run(progress))
    progress(f"tracing and writing the target, {plan.target.name}, {plan.precision.name}")
    trees = plan.limits.max_tree_nodes > 0
    target = write_target(
        plan.target, plan.precision, plan.limits.max_context, store, taps=plan.taps, trees=trees
    )
    draft = None
    if plan.draft is not None:
        progress(f"writing the draft, {plan.draft.name}")
        draft = plan.draft.write(onnx, store, target_vocab=target.vocab_size, trees=trees)
    _write_accept(target, draft, directory, store)
    plan.target.save_tokenizer(directory)
    manifest = _manifest(plan, model_card(plan.target, target, plan.precision), draft)
    progress("checking the graphs against the checkpoints")
    manifest = replace(manifest, gates=_gates(plan, target, draft, directory))
    progress("measuring step times")
    latency = measure(directory, manifest)
    _write_report(directory, "latency", latency)
    _warn_of_acceptance(manifest, plan.taps, latency["acceptance"])
    return manifest


def _fill_engines(
    plan: BuildPlan, asked: EngineBuild, directory: Path, progress: Progress
) -> Manifest:
    """The same with plans in place of graphs; step times are measured where there is a GPU."""
    if plan.calibration is not None:
        _write_report(directory, "calibration", plan.calibration.run(progress))
    written = write_engines(asked, plan.target, plan.draft, plan.limits, directory, progress)
    plan.target.save_tokenizer(directory)
    card = model_card(plan.target, written.target, asked.precision)
    manifest = replace(_manifest(plan, card, written.draft), engines=written.card)
    return replace(manifest, gates=written.gates(_gate_tokens(plan, directory)))


def _fill_provider(
    plan: BuildPlan, asked: ProviderBuild, directory: Path, progress: Progress
) -> Manifest:
    """The same with graphs for ONNX Runtime's CUDA provider."""
    target, draft, limits = plan.target, plan.draft, plan.limits
    written = write_provider_graphs(asked, target, draft, limits, directory, progress)
    target.save_tokenizer(directory)
    card = model_card(target, written.target, asked.precision)
    manifest = replace(_manifest(plan, card, written.draft), backend=PROVIDER_BACKEND)
    return replace(manifest, gates=written.gates(_gate_tokens(plan, directory)))


def _warn_of_acceptance(
    manifest: Manifest, taps: tuple[int, ...], acceptance: float | None
) -> None:
    """What no file shows: that a draft, right in all its shapes, was made for something else."""
    draft = manifest.draft
    if draft is None or not {"draft", "heads"} & set(draft.graphs):
        return  # nothing that was trained
    if acceptance is None or acceptance >= LEAST_ACCEPTANCE:
        return
    reads = f", and that it reads the target's states {list(taps)}" if taps else ""
    logger.warning(
        "--draft %s: received %.0f %% of first drafts accepted on the shipped prompts. Expected at "
        "least %.0f %%; check that it was trained for %s%s, and its map of tokens (d2t).",
        draft.name,
        100 * acceptance,
        100 * LEAST_ACCEPTANCE,
        manifest.target.name,
        reads,
    )


def _write_accept(
    target: WrittenGraph, draft: WrittenDraft | None, directory: Path, store: WeightStore
) -> None:
    """The accept graph reads q over the draft's tokens, and maps them where they are fewer."""
    d2t = draft.d2t if draft else None
    write_accept(target.vocab_size, draft.vocab_size if draft else None, d2t, store)
    if d2t is not None:
        np.save(directory / "d2t.npy", d2t.astype(np.int64))


def _write_report(directory: Path, name: str, report: dict[str, object]) -> None:
    reports = directory / "reports"
    reports.mkdir(exist_ok=True)
    (reports / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _gates(
    plan: BuildPlan, target: WrittenGraph, draft: WrittenDraft | None, directory: Path
) -> tuple[Gate, ...]:
    tokens = _gate_tokens(plan, directory)
    k = max(1, min(plan.limits.max_draft_tokens, len(tokens) // 3))
    path = directory / "onnx" / "target.onnx"
    found = _target_gates(plan, target, path, tokens, k)
    return (*found, *(draft.gates(tokens, _states(plan, target, path)) if draft else ()))


def _states(plan: BuildPlan, written: WrittenGraph, path: Path) -> States:
    """As the graph gives them that the bundle gets."""

    def states(tokens: Sequence[int]) -> np.ndarray:
        graph = GateGraph(path, written.cache, written.vocab_size)
        graph.rows(tokens)
        return graph.features

    return states if plan.taps else no_states


def _target_gates(
    plan: BuildPlan, written: WrittenGraph, path: Path, tokens: list[int], k: int
) -> list[Gate]:
    engine = GateGraph(path, written.cache, written.vocab_size)
    with gates.exact_arithmetic(path) as variant:
        wide = replace(written.cache, dtype="float32")
        exact = GateGraph(variant, wide, written.vocab_size)
        parity = gates.parity(
            "target parity",
            lambda: exact.in_chunks(tokens),
            lambda: engine.in_chunks(tokens),
            plan.target.load_eager,
            tokens,
            plan.precision,
            written.rounded,
            needs_bytes=plan.target.eager_bytes(),
        )
        rows = gates.rows_at_once(exact, tokens, k)
        noise = gates.engine_noise(engine, exact, tokens, k, plan.precision)
        features = _features_gates(plan, written, exact, tokens)
    return [parity, rows, noise, gates.rollback(engine, tokens, k), *features]


def _features_gates(
    plan: BuildPlan, written: WrittenGraph, exact: GateGraph, tokens: list[int]
) -> list[Gate]:
    if not plan.taps:
        return []
    return [
        gates.features_parity(
            exact,
            plan.target.load_eager,
            tokens,
            plan.taps,
            plan.precision,
            written.rounded,
            needs_bytes=plan.target.eager_bytes(),
        )
    ]


def _gate_tokens(plan: BuildPlan, directory: Path) -> list[int]:
    """Real text where the tokenizer has words for it; always at least a few tokens.

    At most 3/4 of the context: the gates append another third to it.
    """
    special = plan.target.special_tokens()
    text = Text(directory / "tokenizer.json", None, special.bos_token_id, special.eos_token_ids)
    limit = min(GATE_TOKENS, plan.limits.max_context * 3 // 4 - 1)
    ids = text.encode(GATE_TEXT)[:limit]
    vocab = plan.target.config.vocab_size
    if len(ids) < 12:
        ids = [(7 * i + 3) % vocab for i in range(min(limit, 24))]
    return [t % vocab for t in ids]


def _manifest(plan: BuildPlan, target: ModelCard, draft: WrittenDraft | None) -> Manifest:
    special = plan.target.special_tokens()
    files: dict[str, FileRecord] = {}
    return Manifest(
        schema=SCHEMA,
        versions=versions(),
        backend=plan.engines.backend if plan.engines else "onnxruntime",
        target=target,
        draft=draft.card if draft else None,
        limits=plan.limits,
        eos_token_ids=special.eos_token_ids,
        bos_token_id=special.bos_token_id,
        tokenizer_sha256="",
        gates=(),
        files=files,
    )


__all__ = ["BuildRequest", "OutriderError", "build"]


def _with_files(manifest: Manifest, files: dict[str, FileRecord]) -> Manifest:
    return replace(manifest, files=files, tokenizer_sha256=files["tokenizer.json"].sha256)
