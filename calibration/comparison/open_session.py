"""A graph whose weights are inputs, in an engine, over a cache of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from runtime.executor import EngineOptions, cache_buffers
from runtime.tree_buffers import chain_inputs

from .model import Model
from .neutral import neutral_inputs

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]


def input_name(layer: str) -> str:
    """Of the input that stands for a weight or a vector."""
    return f"weight of {layer}"


class OpenSession:
    """The opened graph in an engine, over a cache of its own."""

    def __init__(self, proto: onnx.ModelProto, model: Model, options: EngineOptions) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.resolved_threads()
        settings.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(
            proto.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
        cache = model.cache
        past = cache_buffers(cache.past(), cache.shape(1))
        pairs = zip(cache.past(), cache.present(), strict=True)
        self._present = {present.name: past[before.name] for before, present in pairs}
        wanted = {one.name for one in self._session.get_inputs()}
        others = [s for s in model.spec.inputs if s.name not in past and s.name in wanted]
        self._tree = [s.name for s in model.spec.inputs if s.optional and s.name in wanted]
        self._inputs = {**neutral_inputs(others, model.sizes), **past}

    def run(
        self,
        weights: Mapping[str, Array],  # every layer's, and of the vectors that were opened
        values: Mapping[str, Array],  # inputs that are not neutral
        outputs: Mapping[str, Array],
    ) -> None:
        named = {input_name(name): weight for name, weight in weights.items()}
        chain = chain_inputs(values["input_ids"].shape[1])
        named |= {name: chain[name] for name in self._tree}
        binding = self._session.io_binding()
        for name, array in {**self._inputs, **values, **named}.items():
            binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        for name, array in {**self._present, **outputs}.items():
            binding.bind_output(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        self._session.run_with_iobinding(binding)
