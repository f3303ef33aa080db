"""Opens the graphs of a bundle of engines: plans on the GPU, a draft's graph where it runs.

Placement: with `--draft-backend onnxruntime` the draft is ONNX Runtime's, on the CPU. Its tokens
and its rows of q cross to the GPU where accept reads them, of a head the target's states to it;
nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from ..captured_calls import Binds, Bound
from ..captured_programs import Program
from ..captured_tree import CapturedTrees, TreeEngines
from ..capturing import Capturing
from ..contract import GraphSpec, draft_decoder_graph, tail_graph
from ..draft_model import DraftModel
from ..engine_contract import context_buckets
from ..executor import EngineOptions, Executor
from ..manifest import Manifest
from ..round import Rounds
from ..split_draft import SplitDraft
from ..steps import Steps
from ..target import TargetStep
from ..tree_contract import (
    TREE_GRAPHS,
    caches_a_call,
    path_graph,
    pick_graph,
    place_graph,
)
from ..whole_chain import WholeDrafter, captured_chains
from ..whole_rounds import WholeRounds
from ..whole_tree import WholeTreeEngines, WholeTrees
from .call import CudaCall, InTurn
from .device import Device
from .executor import CudaExecutor
from .residents import resident_tensors

Array = NDArray[Any]
RESERVE_BYTES = 512 << 20  # that captures leave free on the device
_TARGETS_OWN = ("target", "accept")


class EngineGraphs:
    """One device for all of a bundle's plans."""

    suffix = "plan"

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Raises BundleError and EngineError before anything is allocated."""
        self.device = Device(path, manifest)
        self._path, self._manifest = path, manifest
        self._executors: dict[str, CudaExecutor] = {}
        self._draft: SplitDraft | None = None
        card = manifest.engines
        assert card is not None
        self._draft_on_gpu = card.draft_backend == card.package
        self._capturing = Capturing(
            contexts=context_buckets(manifest.limits.max_context),
            free_bytes=self.device.free_bytes,
            reserve_bytes=RESERVE_BYTES,
            allocate=self.device.memory.pinned,
            make=self._make,
        )

    def open(self, name: str, spec: GraphSpec, options: EngineOptions) -> Executor:
        if name not in _TARGETS_OWN and not self._draft_on_gpu:
            return Executor.load(self._path / "onnx" / f"{name}.onnx", spec, options)
        card = self._manifest.draft_model
        if name == "draft" and card is not None and self._has(("tail",)):
            decoder = self._engine(name, draft_decoder_graph(card.cache))
            tail = self._engine("tail", tail_graph())
            self._draft = SplitDraft(decoder=decoder, tail=tail, in_turn=InTurn)
            return cast(Executor, self._draft)
        # The same protocol; the steps bind and run it as they do ONNX Runtime's.
        return cast(Executor, self._engine(name, spec))

    def _engine(self, name: str, spec: GraphSpec) -> CudaExecutor:
        plan = self._path / "engines" / f"{name}.plan"
        resident = resident_tensors(name, self._manifest)
        self._executors[name] = CudaExecutor.load(self.device, plan, spec, resident)
        return self._executors[name]

    def rounds(self, steps: Steps) -> Rounds:
        """Launched whole where the draft's engine is beside the target's; of other trees the part
        that the target decides.
        """
        limits, drafter = self._manifest.limits, steps.drafter
        captured, trees, whole_trees = None, None, None
        if isinstance(drafter, WholeDrafter) and {"draft", "tail"} & set(self._executors):
            captured = captured_chains(
                self._binding(), steps.target, drafter, self._manifest, self._capturing
            )
        if limits.max_tree_nodes:
            trees = self._trees(steps)
        if isinstance(drafter, DraftModel) and self._has(TREE_GRAPHS):
            whole_trees = self._whole_trees(steps.target, drafter)
        return WholeRounds(
            steps,
            captured=captured,
            trees=trees,
            whole_trees=whole_trees,
            max_context=limits.max_context,
        )

    def _binding(self) -> Mapping[str, Binds]:
        """What binds calls, by the name of the graph in the contract."""
        return self._executors | ({"draft": self._draft} if self._draft is not None else {})

    def _trees(self, steps: Steps) -> CapturedTrees:
        engines = TreeEngines(
            target=self._executors["target"],
            accept=self._executors["accept"],
            target_caches=steps.target.caches,
        )
        return CapturedTrees(engines, steps.buffers, steps.target.features, self._capturing)

    def _has(self, names: Sequence[str]) -> bool:
        """Plans that bundles of an earlier build lack: what they are for then takes the steps."""
        return all(f"engines/{name}.plan" in self._manifest.files for name in names)

    def _whole_trees(self, target: TargetStep, drafter: DraftModel) -> WholeTrees:
        executors, cache = self._executors, self._manifest.target.cache
        specs = {"pick": pick_graph(), "path": path_graph(cache), "place": place_graph(cache)}
        for name, spec in specs.items():
            self.open(name, spec, EngineOptions())
        engines = WholeTreeEngines(
            **{name: executors[name] for name in ("target", "branch", "accept", *specs)},
            target_caches=target.caches,
            draft_caches=drafter.caches,
            joined=target.joined_caches(caches_a_call(cache)),
        )
        return WholeTrees(
            engines,
            vocab=self._manifest.target.vocab_size,
            draft_vocab=self._manifest.draft_vocab_size,
            capturing=self._capturing,
        )

    def _make(self, calls: Sequence[Bound], rows: int, up: Array, down: Array) -> Program:
        return self.device.capture(cast(Sequence[CudaCall], calls), rows, up=up, down=down)

    @property
    def executors(self) -> Mapping[str, CudaExecutor]:
        """An engine each, of all that were opened, those of `rounds` among them."""
        return self._executors

    def upload(self, array: Array) -> None:
        twin = self.device.mirrors.address(array)
        self.device.memory.to_device(twin, array.ctypes.data, array.nbytes)

    def download(self, array: Array) -> None:
        twin = self.device.mirrors.address(array)
        self.device.memory.to_host(array.ctypes.data, twin, array.nbytes)
        self.device.synchronize()

    def close(self) -> None:
        self.device.close()
