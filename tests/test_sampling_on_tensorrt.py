"""The accept graph and the draft's sampling tail parse and build with TensorRT-RTX, without a GPU.

Needs the `tensorrt-rtx` extra; an engine is built for a compute capability, never run here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from export.accept_graph import accept_model
from export.certificates.round_graphs import draft_tail_model

trt = pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)

VOCAB = 49_152
D2T = np.arange(0, VOCAB, 8) - np.arange(VOCAB // 8)
RANGES = {"batch": (1, 1, 4), "k": (1, 4, 8), "k_plus_1": (2, 5, 9), "drafted": (0, 4, 8)}


@pytest.mark.parametrize("graph", ["accept", "draft tail"])
def test_builds_for_sm89(graph: str, tmp_path: Path) -> None:
    if graph == "accept":
        model = accept_model(VOCAB, D2T)
    else:
        model = draft_tail_model(len(D2T), D2T, VOCAB)
    path = tmp_path / "graph.onnx"
    ir.save(model, path)
    logger = _logger(trt)
    plan = _plan(path, model, logger)
    assert plan is not None, logger.seen
    assert plan.nbytes > 0
    assert not [line for line in logger.seen if "Unused Input" in line]


def _plan(path: Path, model: ir.Model, logger: Any) -> Any:
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(path)), [
        str(parser.get_error(i)) for i in range(parser.num_errors)
    ]
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for value in model.graph.inputs:
        assert value.shape is not None
        axes = [d if isinstance(d, int) else RANGES[str(d.value)] for d in value.shape]
        if any(isinstance(axis, tuple) for axis in axes):
            shapes = zip(*(a if isinstance(a, tuple) else (a,) * 3 for a in axes), strict=True)
            profile.set_shape(value.name, *shapes)
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    return builder.build_serialized_network(network, config)


def _logger(trt: Any) -> Any:
    """Keeps what the parser and the builder warn of; a class that needs the package to exist."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.seen: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING:
                self.seen.append(message)

    return Logger()
