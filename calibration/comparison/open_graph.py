"""A bundle's target with its linear weights as inputs: one weight can be exchanged, the rest kept.

Products by quantized weights become plain MatMul in f32, so only weights differ from call to call;
rounding of activations, which the engine adds on top, is not part of what is measured here. Needs
the package onnx, which is imported when a graph is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import Bundle
from runtime.contract import target_graph
from runtime.executor import EngineOptions, cache_buffers

from ..block_quantization import BlockFormat, QuantizedWeight, dequantize
from .neutral import neutral_inputs

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]
_LOOKUPS = ("Gather", "GatherBlockQuantized")
_PRODUCTS = ("MatMul", "MatMulNBits")


class OpenGraph:
    """`weights` by layer name, each read when asked for; `logits` with any of them exchanged."""

    def __init__(self, bundle: Bundle) -> None:
        import onnx

        self._bundle = bundle
        path = bundle.model_path("target")
        self._model = onnx.load(path, load_external_data=False)
        stored = {t.name: t for t in self._model.graph.initializer}
        found = [_Layer.of(node, stored, path.parent) for node in self._model.graph.node]
        self.weights: dict[str, _Layer] = {layer.name: layer for layer in found if layer}

    def opened(self, options: EngineOptions) -> OpenSession:
        """Load a copy of the graph with every weight as an input."""
        copy = OpenGraph(self._bundle)
        for layer in copy.weights.values():
            layer.open(copy._model.graph)
        _keep_used(copy._model, self._bundle.model_path("target").parent)
        return OpenSession(copy._model, self._bundle, options)


class OpenSession:
    """The opened graph in an engine."""

    def __init__(self, model: onnx.ModelProto, bundle: Bundle, options: EngineOptions) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.resolved_threads()
        settings.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
        card = bundle.manifest.target
        self._vocab, cache = card.vocab_size, card.cache
        past = cache_buffers(cache.past(), cache.shape(1))
        pairs = zip(cache.past(), cache.present(), strict=True)
        self._present = {present.name: past[before.name] for before, present in pairs}
        others = [s for s in target_graph(cache).inputs if s.name not in past]
        self._inputs = {**neutral_inputs(others, {"batch": 1, "vocab": self._vocab}), **past}

    def logits(self, tokens: list[int], weights: Mapping[str, Array]) -> Array:
        """[len(tokens), vocab] f32 of a fresh context; `weights`: every layer's."""
        logits = np.zeros((1, len(tokens), self._vocab), np.float32)
        inputs = {
            **self._inputs,
            "input_ids": np.array([tokens], np.int64),
            "num_logits": np.array(len(tokens), np.int64),
            **{_input_name(name): weight for name, weight in weights.items()},
        }
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        for name, array in {**self._present, "logits": logits}.items():
            binding.bind_output(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits[0]


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One weight where it is used: a product by it, or a lookup of rows."""

    name: str
    node: onnx.NodeProto
    stored: Mapping[str, onnx.TensorProto]
    folder: Path

    @classmethod
    def of(
        cls, node: onnx.NodeProto, stored: Mapping[str, onnx.TensorProto], folder: Path
    ) -> _Layer | None:
        name = node.input[1] if node.op_type in _PRODUCTS else node.input[0] if node.input else ""
        if node.op_type not in (*_PRODUCTS, *_LOOKUPS) or name not in stored:
            return None
        if len(stored[name].dims) < 2 or (
            node.op_type == "Gather" and "input_ids" not in node.input
        ):
            return None
        for suffix in (".table", ".codes", ".T"):
            name = name.removesuffix(suffix)
        place = " (lookup)" if node.op_type in _LOOKUPS else ""
        return cls(name=name + place, node=node, stored=stored, folder=folder)

    def read(self) -> Array:
        """As the product takes it [in, out], or the lookup [tokens, features]; f32."""
        if self.node.op_type in ("MatMul", "Gather"):
            return self._stored(self.node.input[1 if self.node.op_type == "MatMul" else 0])
        rows = self._dequantized()
        return np.ascontiguousarray(rows.T) if self.node.op_type == "MatMulNBits" else rows

    def open(self, graph: onnx.GraphProto) -> None:
        """Rewire the node to an input that stands for the weight."""
        import onnx

        name = _input_name(self.name)
        value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, None])
        graph.input.append(value)
        if self.node.op_type in _LOOKUPS:
            inputs, op_type = [name, self.node.input[1]], "Gather"
        else:
            inputs, op_type = [self.node.input[0], name], "MatMul"
        bias = self.node.input[5] if len(self.node.input) > 5 else ""
        out = self.node.output[0]
        product = f"{out}.product" if bias else out
        opened = onnx.helper.make_node(op_type, inputs, [product])
        self.node.CopyFrom(opened)
        if bias:
            place = [n.output[0] for n in graph.node].index(product)
            graph.node.insert(place + 1, onnx.helper.make_node("Add", [product, bias], [out]))

    def _dequantized(self) -> Array:
        """[rows, features] f32 of a node with blockwise codes."""
        import onnx

        node = self.node
        values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        lookup = node.op_type in _LOOKUPS
        places = (0, 2, 3) if lookup else (1, 2, 3)
        parts = [node.input[i] if i < len(node.input) else "" for i in places]
        codes, scales = self._stored(parts[0]), self._stored(parts[1])
        zeros = self._stored(parts[2]) if parts[2] else None
        fmt = BlockFormat(bits=values["bits"], block=values["block_size"], symmetric=zeros is None)
        rows = codes.shape[0]
        blocks = scales.reshape(rows, -1)
        weight = QuantizedWeight(
            codes=codes.reshape(rows, blocks.shape[1], -1),
            scales=blocks,
            zero_points=None if zeros is None else zeros.reshape(rows, -1),
        )
        features = fmt.block * blocks.shape[1] if lookup else values["K"]
        return np.ascontiguousarray(dequantize(weight, fmt, features), np.float32)

    def _stored(self, name: str) -> Array:
        import onnx

        return onnx.numpy_helper.to_array(self.stored[name], base_dir=str(self.folder))


def _input_name(layer: str) -> str:
    return f"weight of {layer}"


def _keep_used(model: onnx.ModelProto, folder: Path) -> None:
    """Drop weights that nothing reads any more, and take the small ones in from their file."""
    import onnx

    read = {name for node in model.graph.node for name in node.input}
    kept = [t for t in model.graph.initializer if t.name in read]
    del model.graph.initializer[:]
    for tensor in kept:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            array = onnx.numpy_helper.to_array(tensor, base_dir=str(folder))
            tensor = onnx.numpy_helper.from_array(array, tensor.name)
        model.graph.initializer.append(tensor)
