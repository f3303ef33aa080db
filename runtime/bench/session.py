"""One benchmark from settings to result: load the bundles, run the plan, sum up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bundle import Bundle
from ..decoder import Decoder
from ..errors import InvalidRequest, LimitExceeded
from ..executor import EngineOptions
from ..request import check_tree
from ..sampling import SamplingParams
from .floor import StepFloor, measure_floor
from .machine import describe_machine
from .measure import fitting_prompts, measure, warm_up
from .plan import AUTO, PLAIN, Contestant, DraftLength, interleave
from .prompts import Prompt, categories
from .summary import Figures, Sample, summarize
from .tree_choice import TreeChoice, choose_tree
from .tree_plot import can_plot, plot_trees

DEFAULT_LONGEST = 4  # k = 1 … so many and auto, where -k is not given
FLOOR_BLOCKS = 6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure; `draft_lengths` None takes what each bundle allows."""

    bundles: tuple[Path, ...]
    draft_lengths: tuple[DraftLength, ...] | None = None
    params: SamplingParams
    repeats: int = 3
    options: EngineOptions

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InvalidRequest(f"--repeats: received {self.repeats}. Expected at least 1.")
        if self.params.max_tokens is None or self.params.max_tokens < 2:
            raise InvalidRequest(
                f"--max-tokens: received {self.params.max_tokens}. Expected at least 2: the rate "
                "counts the tokens behind the first."
            )


@dataclass(frozen=True, kw_only=True)
class Result:
    machine: dict[str, Any]
    settings: dict[str, Any]
    bundles: dict[str, dict[str, Any]]
    figures: list[Figures]
    floors: list[StepFloor]
    trees: list[TreeChoice]  # of bundles that were measured with a tree
    skipped: tuple[str, ...]  # ids of prompts too long for a bundle
    samples: list[Sample]

    def as_dict(self) -> dict[str, Any]:
        """JSON values, without the single samples."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["samples"]
        fields["figures"] = [dataclasses.asdict(f) for f in self.figures]
        fields["floors"] = [dataclasses.asdict(f) for f in self.floors]
        fields["trees"] = [dataclasses.asdict(t) for t in self.trees]
        return fields

    def write(self, folder: Path) -> None:
        """`bench.json`, `samples.jsonl` with one request a line, and where trees were measured and
        matplotlib is installed `trees.svg`."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n"
        (folder / "bench.json").write_text(text, encoding="utf-8")
        lines = (json.dumps(_sample_dict(s), ensure_ascii=False) + "\n" for s in self.samples)
        (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
        if self.trees and can_plot():
            plot_trees(self.figures, self.trees, folder / "trees.svg")


def run_session(
    settings: Settings,
    prompts: Sequence[Prompt],
    on_start: Callable[[int], None],
    on_sample: Callable[[Sample], None],
) -> Result:
    """Measure; `on_start` hears how many runs there will be, `on_sample` of each one."""
    bundles = {name: Bundle.load(path) for name, path in _named(settings.bundles).items()}
    machine = describe_machine(settings.options.resolved_threads())
    contestants = _contestants(bundles, settings.draft_lengths)
    decoders = {name: Decoder(bundle, settings.options) for name, bundle in bundles.items()}
    context = min(b.manifest.limits.max_context for b in bundles.values())
    most = settings.params.max_tokens or 0
    fitting, skipped = fitting_prompts(decoders.values(), prompts, context, most)
    if not fitting:
        raise LimitExceeded("every prompt with --max-tokens", most + 1, context, "--max-context")
    on_start(len(contestants) * len(fitting) * settings.repeats)
    warm_up(decoders, contestants, fitting[0])
    runs = interleave(contestants, fitting, settings.repeats)
    samples = measure(decoders, runs, settings.params, on_sample)
    floors = [
        measure_floor(name, bundle, decoders[name], settings.options, FLOOR_BLOCKS)
        for name, bundle in bundles.items()
    ]
    trees = [
        choose_tree(name, decoders[name], samples)
        for name in bundles
        if any(c.tree for c in contestants if c.bundle == name)
    ]
    return Result(
        trees=trees,
        machine=machine,
        settings=_settings_dict(settings, fitting),
        bundles={name: _about(bundle) for name, bundle in bundles.items()},
        figures=summarize(samples, contestants, greedy=settings.params.greedy),
        floors=floors,
        skipped=skipped,
        samples=samples,
    )


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """Bundles by folder name, or by the whole path where two are the same."""
    names = [path.resolve().name for path in paths]
    clear = len(set(names)) == len(names)
    return {name if clear else str(path): path for name, path in zip(names, paths, strict=True)}


def _contestants(
    bundles: dict[str, Bundle], draft_lengths: tuple[DraftLength, ...] | None
) -> list[Contestant]:
    found = []
    for name, bundle in bundles.items():
        most = bundle.manifest.limits.max_draft_tokens
        lengths = draft_lengths
        if lengths is None:
            lengths = (*range(1, min(DEFAULT_LONGEST, most) + 1), AUTO)
        for k in (PLAIN, *(lengths if bundle.manifest.draft else ())):
            if isinstance(k, int) and k > most:
                raise LimitExceeded(f"{name}: draft length -k", k, most, "-k")
            contestant = Contestant(bundle=name, draft_length=k)
            check_tree(contestant.tree, None, bundle.manifest)
            found.append(contestant)
    return found


def _about(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    draft = manifest.draft
    return {
        "target": manifest.target.name,
        "precision": manifest.target.precision,
        "draft": draft.name if draft else "none",
        "draft_precision": draft.precision if draft else "none",
        "max_context": manifest.limits.max_context,
        "max_draft_tokens": manifest.limits.max_draft_tokens,
        "max_tree_nodes": manifest.limits.max_tree_nodes,
    }


def _settings_dict(settings: Settings, prompts: Sequence[Prompt]) -> dict[str, Any]:
    params = dataclasses.asdict(settings.params)
    return {
        **params,
        "stop": list(settings.params.stop),
        "repeats": settings.repeats,
        "num_prompts": len(prompts),
        "categories": list(categories(prompts)),
    }


def _sample_dict(sample: Sample) -> dict[str, Any]:
    run = sample.run
    return {
        "bundle": run.contestant.bundle,
        "mode": run.contestant.label,
        "prompt": run.prompt.id,
        "category": run.prompt.category,
        "repeat": run.repeat,
        "token_ids": list(sample.token_ids),
        "stats": dict(sample.stats),
    }
