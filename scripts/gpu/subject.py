"""A bundle under test: its steps, its captured rounds, and a way to the device's memory.

A bundle of ONNX graphs is a subject, too: a rehearsal on the CPU, where copies are nothing and a
captured round is its calls one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle import Bundle
from runtime.captured_round import CapturedRounds
from runtime.capturing import Capturing
from runtime.contract import GraphSpec
from runtime.engine import Graphs, load_rounds, open_graphs
from runtime.engine_contract import context_buckets
from runtime.executor import EngineOptions, Executor
from runtime.manifest import Manifest
from runtime.round import Rounds
from runtime.steps import Steps
from runtime.whole_chain import WholeDrafter, captured_chains
from runtime.whole_rounds import WholeRounds


class Remembering:
    """Opens graphs and keeps the executors, so that captured rounds share them."""

    def __init__(self, graphs: Graphs) -> None:
        self.suffix = graphs.suffix
        self.graphs = graphs
        self.executors: dict[str, Executor] = {}

    def open(self, name: str, spec: GraphSpec, options: EngineOptions) -> Executor:
        self.executors[name] = self.graphs.open(name, spec, options)
        return self.executors[name]

    def rounds(self, steps: Steps) -> Rounds:
        return self.graphs.rounds(steps)

    def close(self) -> None:
        self.graphs.close()


OpenGraphs = Callable[[Path, Manifest], Graphs]


class Subject:
    def __init__(self, path: Path, open_with: OpenGraphs = open_graphs) -> None:
        self.bundle = Bundle.load(path, verify=False)
        self.manifest = self.bundle.manifest
        self._graphs = Remembering(open_with(path, self.manifest))
        #: None on the CPU
        self.device: Any = getattr(self._graphs.graphs, "device", None)
        options = EngineOptions(spin=False)
        self.rounds = load_rounds(path, self.manifest, options, self._graphs)
        self.buffers = self.rounds.buffers

    @property
    def executors(self) -> dict[str, Executor]:
        """Those of the graphs, and what rounds opened besides on a GPU."""
        return {**self._graphs.executors, **getattr(self._graphs.graphs, "executors", {})}

    @property
    def drafts(self) -> bool:
        """Whether a draft's or a head's engines are where the target's are: what a round
        captures."""
        return isinstance(self.rounds.drafter, WholeDrafter) and self._draft_beside_target

    @property
    def _draft_beside_target(self) -> bool:
        card = self.manifest.engines
        return card is None or card.draft_backend == card.package

    def upload(self, array: np.ndarray) -> None:
        self._graphs.graphs.upload(array)

    def download(self, array: np.ndarray) -> None:
        self._graphs.graphs.download(array)

    def captured(self) -> CapturedRounds:
        """Those that decoding launches; on the CPU, the calls one by one."""
        if isinstance(self.rounds, WholeRounds) and self.rounds.captured is not None:
            return self.rounds.captured
        drafter = self.rounds.drafter
        assert isinstance(drafter, WholeDrafter)
        return captured_chains(
            self.executors,
            self.rounds.target,
            drafter,
            self.manifest,
            Capturing.by_calls(context_buckets(self.manifest.limits.max_context)),
        )

    def close(self) -> None:
        self._graphs.close()
