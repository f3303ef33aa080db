"""Opens the graphs of a bundle for ONNX Runtime's CUDA provider.

A draft step is two graphs here: its decoder, which has the weights and takes any shape, and the
sampling tail behind it. What passes between them stays on the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from ..contract import DRAFT_PROBS, DRAFT_STEP_PROBS, LOGITS, GraphSpec, tail_graph
from ..executor import EngineOptions, Executor
from ..manifest import Manifest
from ..provider_contract import draft_decoder, is_decoder, provider_spec
from ..round import Rounds
from ..split_draft import SplitDraft
from ..steps import Steps
from .call import InTurn
from .executor import DecoderExecutor, ProviderGraph, SamplingExecutor, graph_numbers
from .sessions import CUDA, Provider, check_provider
from .values import DeviceValues

Array = NDArray[Any]


class ProviderGraphs:
    """One device for all of a bundle's graphs."""

    suffix = "onnx"

    def __init__(self, path: Path, manifest: Manifest, provider: Provider = CUDA) -> None:
        """Raises EngineError before anything is allocated."""
        check_provider(provider)
        self.provider = provider
        self._path, self._manifest = path, manifest
        self._values = DeviceValues(provider)
        # Of what only sessions touch, nothing is copied; a lookup's q is written by the host.
        drafts = "onnx/tail.onnx" in manifest.files
        self._resident = frozenset(
            {LOGITS.name, *((DRAFT_PROBS.name, DRAFT_STEP_PROBS.name) if drafts else ())}
        )

    def open(self, name: str, spec: GraphSpec, options: EngineOptions) -> Executor:
        """options: none of them matters here, the host only enqueues."""
        if is_decoder(spec):
            if DRAFT_STEP_PROBS in spec.outputs:
                found: object = self._draft(name, spec)
            else:
                found = self._decoder(name, provider_spec(spec))
        else:
            found = SamplingExecutor(self._graph(name), spec, self._some_sizes())
        # The same protocol; the steps bind and run it as they do the CPU's.
        return cast(Executor, found)

    def rounds(self, steps: Steps) -> Rounds:
        return Rounds(steps)

    def upload(self, array: Array) -> None:
        self._values.upload(array)

    def download(self, array: Array) -> None:
        self._values.download(array)

    def close(self) -> None:
        """Sessions and values go with their executors."""

    def _decoder(self, name: str, spec: GraphSpec) -> DecoderExecutor:
        return DecoderExecutor(
            self._graph(name),
            spec,
            most_captured_rows=self._manifest.limits.max_draft_tokens + 1,
            graphs=graph_numbers(),
        )

    def _draft(self, name: str, spec: GraphSpec) -> SplitDraft:
        tail = SamplingExecutor(self._graph("tail"), tail_graph(), self._some_sizes())
        decoder = self._decoder(name, draft_decoder(spec))
        return SplitDraft(decoder=decoder, tail=tail, in_turn=InTurn)

    def _graph(self, name: str) -> ProviderGraph:
        file = self._path / "onnx" / f"{name}.onnx"
        return ProviderGraph(file, self.provider, self._values, self._resident)

    def _some_sizes(self) -> dict[str, int]:
        """Of a round with all drafts."""
        k = max(1, self._manifest.limits.max_draft_tokens)
        return {"batch": 1, "k": k, "k_plus_1": k + 1, "num_q_rows": k, "drafted": 0}
