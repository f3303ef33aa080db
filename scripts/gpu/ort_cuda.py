"""ONNX Runtime's CUDA provider on a bundle's target graph: device-bound, no fallback to the CPU."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle import Bundle

REPEATS = 20


def measure(path: Path) -> dict[str, Any]:
    """A plain step of the target at half its context, ms; with the provider's graph, too."""
    return {name: _step_ms(path, graph) for name, graph in (("plain", "0"), ("captured", "1"))}


def _step_ms(path: Path, graph: str) -> float:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(
        path / "onnx" / "target.onnx",
        options,
        providers=[("CUDAExecutionProvider", {"enable_cuda_graph": graph})],
    )
    if session.get_providers()[0] != "CUDAExecutionProvider":
        raise RuntimeError(f"received providers {session.get_providers()}. Expected CUDA first.")
    binding = _bound(session, path)
    seconds = []
    for _ in range(REPEATS + 3):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[3:])


def _bound(session: Any, path: Path) -> Any:
    import onnxruntime

    manifest = Bundle.load(path, verify=False).manifest
    cache = manifest.target.cache
    binding = session.io_binding()
    values = {
        "input_ids": np.ones((1, 1), np.int64),
        "past_lengths": np.array([cache.max_context // 2], np.int32),
        "num_logits": np.array(1, np.int64),
    }
    values |= {s.name: np.zeros(cache.shape(1), s.dtype) for s in cache.past()}
    held = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(value, "cuda", 0)
        for name, value in values.items()
    }
    for name in (i.name for i in session.get_inputs()):
        binding.bind_ortvalue_input(name, held[name])
    for output in session.get_outputs():
        source = output.name.replace("present", "past_key_values")
        if source in held:
            binding.bind_ortvalue_output(output.name, held[source])
        else:
            binding.bind_output(output.name, "cuda")
    return binding
