"""A calibrated recipe on its way into a build: reference graph, texts, statistics, codes.

All of it happens in a folder of its own, named after what it depends on: a build that is
interrupted, or fails later, finds there what was done. The reference is the target in f32, written
one weight at a time and run by ONNX Runtime: here, too, no model is held.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibration.answers import ANSWER_TOKENS, Tokens, Writer
from calibration.cache_steps import CacheSteps, cache_reach
from calibration.collect import Calibration
from calibration.factors import Factors
from calibration.input_scales import InputScales, find_scales
from calibration.sites import ReferenceGraph
from calibration.solve import Solver, solve, solve_scaled
from calibration.solved import SolvedWeights
from calibration.texts import CalibrationTexts, read_texts
from engines.external_data import WeightStore
from runtime.errors import BuildError
from runtime.executor import EngineOptions
from runtime.text import Text

from .checkpoint import Checkpoint
from .graphs import WrittenGraph, write_target
from .precision import PRECISIONS, Precision

SCHEMA = 1  # of what the folder holds
CACHE = Path("~/.cache/outrider")
MOST_CONTEXT = 512  # tokens of one text
REPORT = "report.json"  # stands in a folder where all is solved


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """prompt_files: none for the default set; cache: where state and results are kept."""

    prompt_files: tuple[Path, ...] = ()
    cache: Path = CACHE


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """A target, its texts and the folder; `run` fills `precision.solved`."""

    target: Checkpoint
    precision: Precision
    texts: CalibrationTexts
    folder: Path
    answers: Path  # what the target has written; the same for all recipes
    context: int

    @property
    def solved(self) -> SolvedWeights:
        assert self.precision.solved is not None  # of a recipe of codes
        return self.precision.solved

    def run(self, tell: Callable[[str], None]) -> dict[str, Any]:
        """Solve every layer; returns the report. Raises EngineError for non-finite activations."""
        if (self.folder / REPORT).exists():
            tell(f"calibrated before, in {self.folder}")
            report: dict[str, Any] = json.loads((self.folder / REPORT).read_text(encoding="utf-8"))
            self._recall(report)
            return report
        onnx = self.folder / "reference"
        written = self._reference(onnx, tell)
        texts = self._writer(onnx, written, tell).answered(self.texts.texts)
        run = Calibration(
            cache=written.cache,
            vocab=written.vocab_size,
            texts=texts,
            work=self.folder,
            options=EngineOptions(spin=False),
            tell=tell,
        )
        graph = ReferenceGraph(onnx / "target.onnx")
        report = self._report(texts, self._solve(graph, run))
        write_json(self.folder / REPORT, report)
        shutil.rmtree(onnx)
        for state in ("hessian.npz", "ranges.npz", "caches.npz"):
            for path in self.folder.rglob(state):
                path.unlink()
        return report

    def _writer(self, onnx: Path, written: WrittenGraph, tell: Callable[[str], None]) -> Writer:
        return Writer(
            path=onnx / "target.onnx",
            cache=written.cache,
            vocab=written.vocab_size,
            eos_token_ids=frozenset(self.target.special_tokens().eos_token_ids),
            kept=self.answers,
            options=EngineOptions(spin=False),
            tell=tell,
        )

    def _reference(self, onnx: Path, tell: Callable[[str], None]) -> WrittenGraph:
        tell(f"writing the reference of {self.target.name}, fp32, in {onnx}")
        shutil.rmtree(onnx, ignore_errors=True)
        onnx.mkdir(parents=True)
        store = WeightStore(directory=onnx)
        return write_target(self.target, PRECISIONS["fp32"], self.context, store)

    def _solve(self, graph: ReferenceGraph, run: Calibration) -> dict[str, Any]:
        """What the recipe asks for, and what the report says of it."""
        if self.precision.caches is not None:
            self.precision.caches.put(cache_reach(graph, run))
            return {"cache_steps": len(self.precision.caches.found)}
        eight, inputs = self.precision.eight_bits, self.precision.inputs
        if eight is None or inputs is None:
            if self.precision.solver is Solver.AWQ:
                solve_scaled(graph, run, self.solved, self._is_vector)
            else:
                solve(graph, run, self.solved)
            errors = {name: self.solved.errors(name) for name in sorted(self.solved.names)}
            return {
                "output_error": {
                    name: {"solved": error, "nearest": nearest}
                    for name, (error, nearest) in errors.items()
                }
            }
        found = find_scales(
            graph,
            run,
            top=eight.top,
            rule=self.precision.rule,
            smooth=self.precision.smooth,
            most_reach=self.precision.most_reach,
        )
        inputs.put(found)
        return {"input_scale": {name: one.scale for name, one in found.items()}}

    def _is_vector(self, name: str) -> bool:
        return self.target.find(name) is not None

    def _recall(self, report: dict[str, Any]) -> None:
        if self.precision.caches is not None:
            self.precision.caches.recall()
        elif self.precision.inputs is not None:
            self.precision.inputs.recall()
        else:
            self.solved.recall(report["output_error"])
            if self.solved.factors is not None:
                self.solved.factors.recall()

    def _report(self, texts: Sequence[Tokens], found: dict[str, Any]) -> dict[str, Any]:
        return {
            "recipe": self.precision.name,
            "tokens": sum(map(len, texts)),
            "texts": [list(tokens) for tokens in texts],
            **found,
        }


def plan_calibration(
    request: CalibrationRequest, target: Checkpoint, precision: Precision, context: int
) -> CalibrationPlan:
    """Raises InvalidRequest for too little text."""
    context = min(context, MOST_CONTEXT)
    texts = _texts(request, target, max(1, context - ANSWER_TOKENS))
    cache, text_key = request.cache.expanduser(), [SCHEMA, target.sha256(), texts.digest]
    folder = cache / f"calibration-{precision.name}-{_digest([*text_key, _recipe(precision)])}"
    return CalibrationPlan(
        target=target,
        precision=_with_results(precision, folder, target),
        texts=texts,
        folder=folder,
        answers=cache / f"calibration-answers-{_digest(text_key)}.json",
        context=context,
    )


def _recipe(precision: Precision) -> str:
    """What of it decides what is found."""
    eight = (precision.eight_bits, precision.smooth, precision.rule, precision.most_reach)
    parts = (precision.format, *eight)
    return repr((precision.name, *parts))


def _digest(key: list[Any]) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _with_results(precision: Precision, folder: Path, target: Checkpoint) -> Precision:
    """The recipe with a place for what it finds."""
    if precision.int8_caches:
        return replace(precision, caches=CacheSteps(path=folder / "cache_steps.npz"))
    if precision.eight_bits is not None:
        return replace(precision, inputs=InputScales(path=folder / "inputs.npz"))
    assert precision.format is not None  # a recipe of codes has one
    factors = Factors(path=folder / "factors.npz")
    solved = SolvedWeights(
        directory=folder / "solved",
        format=precision.format,
        rows_of=lambda name: _rows_of(target, name),
        factors=factors if precision.solver is Solver.AWQ else None,
    )
    return replace(precision, solved=solved)


def write_json(path: Path, value: object) -> None:
    """Whole, or not there."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(path)


def refuse_without_recipe(request: CalibrationRequest, name: str, recipe: Precision | None) -> None:
    """Raises BuildError where texts are given to a precision that reads none."""
    if request.prompt_files and not (recipe is not None and recipe.calibrated):
        names = ", ".join(p.name for p in PRECISIONS.values() if p.calibrated)
        raise BuildError(
            f"--calibration-prompts: received it with --precision {name}, which reads no "
            f"text. Expected one of {names}."
        )


def _texts(request: CalibrationRequest, target: Checkpoint, context: int) -> CalibrationTexts:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        target.save_tokenizer(directory)
        template = directory / "chat_template.jinja"
        special = target.special_tokens()
        text = Text(
            directory / "tokenizer.json",
            template.read_text(encoding="utf-8") if template.exists() else None,
            special.bos_token_id,
            special.eos_token_ids,
        )
        vocab = target.config.vocab_size
        return read_texts(request.prompt_files, text, vocab=vocab, room=context)


def _rows_of(target: Checkpoint, name: str) -> int:
    """Of a weight as the graph has it, perhaps turned."""
    stored = target.find(name.removesuffix(".T")) or name
    shape = target.shape(stored)
    return shape[1] if name.endswith(".T") else shape[0]
