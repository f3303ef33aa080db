"""Graphs lowered for TensorRT, run on ONNX Runtime's CPU: the oracle that needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from helpers_family import CHUNKS

Array = np.ndarray
NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64,
         "tensor(int32)": np.int32, "tensor(bool)": np.bool_}  # fmt: skip


def run_unfused(model: ir.Model, feed: Mapping[str, Array]) -> list[Array]:
    """As the graph says: ONNX Runtime would round activations where it sees quantized weights."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feed))


class OracleGraph:
    """A target graph with whatever inputs it declares; caches are fed and taken back."""

    def __init__(self, path: Path, max_context: int) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._max_context = max_context
        self.length = 0
        self._caches = {
            i.name: np.zeros([1, *i.shape[1:]], NUMPY[i.type])
            for i in self._session.get_inputs()
            if i.name.startswith("past_key_values.")
        }

    def rows(self, tokens: Sequence[int], context: int | None = None, **tree: Array) -> Array:
        """Append `tokens`, reading `context` cache rows: logits [len(tokens), vocab] f32.

        tree: depths and visible; a chain without.
        """
        count = len(tokens)
        known: dict[str, Any] = {
            "input_ids": np.array([tokens], np.int64),
            "past_lengths": np.array([self.length], np.int32),
            "num_logits": np.array(count, np.int64),
            "logit_slots": np.zeros(count, np.int32),
            "context_slots": np.zeros(context or self._max_context, np.int32),
            "depths": np.arange(count, dtype=np.int64)[None],
            "visible": np.tril(np.ones((1, count, count), np.bool_)),
            **tree,
            **self._caches,
        }
        feed = {i.name: known[i.name] for i in self._session.get_inputs()}
        found = dict(zip(self._outputs, self._session.run(None, feed), strict=True))
        for name, value in found.items():
            if name.startswith("present."):
                self._caches[name.replace("present", "past_key_values")] = value
        self.length += count
        return found["logits"][0]

    def in_chunks(self, tokens: Sequence[int], bucket: int = 1) -> Array:
        """Uneven chunks, each after a wrong one that was rolled back.

        bucket: contexts are the least multiple of it that holds every row; 1 is as tight as can be.
        """
        self.length, start, found = 0, 0, []
        for size in CHUNKS:
            chunk = list(tokens[start : start + size])
            self.rows([(t + 11) % 90 for t in [*chunk, *chunk[:2]]])
            self.length = start
            context = -(-(start + size) // bucket) * bucket
            found.append(self.rows(chunk, min(context, self._max_context)))
            start += size
        return np.concatenate(found)


def types_of(model: ir.Model, *op_types: str) -> set[ir.DataType | None]:
    """Types of what these nodes make."""
    return {v.dtype for n in model.graph if n.op_type in op_types for v in n.outputs}
