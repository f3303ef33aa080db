"""A bundle's model with its linear weights as inputs: one weight can be exchanged, the rest kept.

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
from runtime.contract import CacheSpec, GraphSpec, draft_graph, target_graph
from runtime.executor import EngineOptions, cache_buffers
from runtime.tree_buffers import chain_inputs

from ..block_quantization import BlockFormat, QuantizedWeight, dequantize
from .neutral import neutral_inputs

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]
_LOOKUPS = ("Gather", "GatherBlockQuantized")
_PRODUCTS = ("MatMul", "MatMulNBits")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Target or draft of a bundle, as its contract describes it."""

    path: Path
    spec: GraphSpec
    cache: CacheSpec
    vocab: int  # of what it gives
    sizes: Mapping[str, int]  # of its inputs' axes

    @classmethod
    def target(cls, bundle: Bundle) -> Model:
        card = bundle.manifest.target
        path, spec = bundle.model_path("target"), target_graph(card.cache)
        sizes = {"batch": 1, "vocab": card.vocab_size}
        return cls(path=path, spec=spec, cache=card.cache, vocab=card.vocab_size, sizes=sizes)

    @classmethod
    def draft(cls, bundle: Bundle) -> Model:
        card = bundle.manifest.draft_model
        assert card is not None  # sides without a draft are refused before
        path, spec = bundle.model_path("draft"), draft_graph(card.cache)
        sizes = {"batch": 1, "vocab": bundle.manifest.target.vocab_size}
        size = bundle.manifest.draft_vocab_size
        return cls(path=path, spec=spec, cache=card.cache, vocab=size, sizes=sizes)


class OpenGraph:
    """`weights` by layer name, each read when asked for; `opened` takes any of them as inputs."""

    def __init__(self, model: Model) -> None:
        import onnx

        self.model = model
        self._proto = onnx.load(model.path, load_external_data=False)
        graph = self._proto.graph
        stored = {t.name: t for t in graph.initializer}
        found = [_Layer.of(node, stored, model.path.parent) for node in graph.node]
        self.weights: dict[str, _Layer] = {layer.name: layer for layer in found if layer}

    def opened(self, options: EngineOptions) -> OpenSession:
        """Load a copy of the graph with every weight as an input."""
        copy = OpenGraph(self.model)
        for layer in copy.weights.values():
            layer.open(copy._proto.graph)
        _keep_used(copy._proto, self.model.path.parent)
        return OpenSession(copy._proto, self.model, options)


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
        weights: Mapping[str, Array],  # every layer's
        values: Mapping[str, Array],  # inputs that are not neutral
        outputs: Mapping[str, Array],
    ) -> None:
        named = {_input_name(name): weight for name, weight in weights.items()}
        chain = chain_inputs(values["input_ids"].shape[1])
        named |= {name: chain[name] for name in self._tree}
        binding = self._session.io_binding()
        for name, array in {**self._inputs, **values, **named}.items():
            binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        for name, array in {**self._present, **outputs}.items():
            binding.bind_output(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        self._session.run_with_iobinding(binding)


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

    read = _names_read(model.graph)
    kept = [t for t in model.graph.initializer if t.name in read]
    del model.graph.initializer[:]
    for tensor in kept:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            array = onnx.numpy_helper.to_array(tensor, base_dir=str(folder))
            tensor = onnx.numpy_helper.from_array(array, tensor.name)
        model.graph.initializer.append(tensor)


def _names_read(graph: onnx.GraphProto) -> set[str]:
    """By its nodes and those of loops and branches within it."""
    names = {name for node in graph.node for name in node.input}
    bodies = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return names.union(*map(_names_read, bodies))
