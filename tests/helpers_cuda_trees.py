"""Bundles of engines that verify trees, for the device that is this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_build import K
from helpers_cuda import VERSION, fake_plan

from engines.tensorrt import ranges
from export import engine_bundle
from export.build import BuildRequest, build
from runtime import engine_contract
from runtime.bundle import Bundle
from runtime.cuda.graphs import EngineGraphs
from runtime.engine import load_rounds
from runtime.executor import EngineOptions
from runtime.round import Rounds

NODES, CONTEXT = 24, 96


def use_small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_contract, "LEAST_CONTEXT", 32)
    monkeypatch.setattr(ranges, "LEAST_CONTEXT", 32)


def build_engines(out: Path, target: Path, draft: str, draft_backend: str | None = None) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine_bundle, "build_plan", fake_plan)
        real = engine_bundle._Builder.card
        monkeypatch.setattr(
            engine_bundle._Builder, "card", lambda self: replace(real(self), version=VERSION)
        )
        return build(
            BuildRequest(
                target=str(target),
                draft=draft,
                out=out,
                backend="tensorrt-rtx",
                precision="fp16",
                draft_backend=draft_backend,
                max_context=CONTEXT,
                max_draft_tokens=K,
                max_tree_nodes=NODES,
            )
        )


class Pair:
    """Rounds on two devices, and a look at their caches."""

    def __init__(self, path: Path) -> None:
        manifest = Bundle.load(path).manifest
        self.graphs = [EngineGraphs(path, manifest) for _ in range(2)]
        self.rounds: list[Rounds] = [
            load_rounds(path, manifest, EngineOptions(), graphs) for graphs in self.graphs
        ]

    def caches(self, rows: int) -> list[np.ndarray]:
        found = []
        for graphs, rounds in zip(self.graphs, self.rounds, strict=True):
            graphs.download(rounds.target._rows)
            found.append(rounds.target._rows[..., :rows, :].astype(np.float32))
        return found

    def draft_caches(self, rows: int) -> list[list[np.ndarray]]:
        """Of a draft model beside the target, cache by cache."""
        found = []
        for graphs, rounds in zip(self.graphs, self.rounds, strict=True):
            caches = rounds.drafter.caches.values()  # type: ignore[union-attr]
            for one in caches:
                graphs.download(one)
            found.append([one[..., :rows, :].astype(np.float32) for one in caches])
        return found
