"""Opens the graphs of a bundle of engines: plans on the GPU, a draft's graph where it runs.

Placement: with `--draft-backend onnxruntime` the draft is ONNX Runtime's, on the CPU. Its tokens
and its rows of q cross to the GPU where accept reads them; nothing else does.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ..contract import DRAFT_PROBS, DRAFT_STEP_PROBS, LOGITS, GraphSpec
from ..executor import EngineOptions, Executor
from ..manifest import Manifest
from .device import Device
from .executor import CudaExecutor

_TARGETS_OWN = ("target", "accept")


class EngineGraphs:
    """One device for all of a bundle's plans."""

    suffix = "plan"

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Raises BundleError and EngineError before anything is allocated."""
        self.device = Device(path, manifest)
        self._path = path
        card = manifest.engines
        assert card is not None
        self._draft_on_gpu = card.draft_backend == card.library
        plans = [name for name in manifest.files if name.startswith("engines/draft")]
        # Of what only engines touch, nothing is copied; a lookup's q is written by the host.
        self._resident = frozenset(
            {LOGITS.name, *((DRAFT_PROBS.name, DRAFT_STEP_PROBS.name) if plans else ())}
        )

    def open(self, name: str, spec: GraphSpec, options: EngineOptions) -> Executor:
        if name in _TARGETS_OWN or self._draft_on_gpu:
            plan = self._path / "engines" / f"{name}.plan"
            # The same protocol; the steps bind and run it as they do ONNX Runtime's.
            return cast(Executor, CudaExecutor.load(self.device, plan, spec, self._resident))
        return Executor.load(self._path / "onnx" / f"{name}.onnx", spec, options)

    def close(self) -> None:
        self.device.close()
