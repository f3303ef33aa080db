"""A bundle's model with its linear weights as inputs: one weight can be exchanged, the rest kept.

Products by quantized weights become plain MatMul in f32, so only weights differ from call to call;
rounding of activations, which the engine adds on top, is not part of what is measured here. Needs
the package onnx, which is imported when a graph is opened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.executor import EngineOptions

from ..block_quantization import BlockFormat, QuantizedWeight, dequantize
from .model import Model
from .open_session import OpenSession, input_name

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]
_LOOKUPS = ("Gather", "GatherBlockQuantized")
_PRODUCTS = ("MatMul", "MatMulNBits")


class OpenGraph:
    """`weights` by layer name, `vectors` of norms and biases by their own, each read when asked
    for; `opened` takes any of them as inputs.
    """

    def __init__(self, model: Model) -> None:
        import onnx

        self.model = model
        self._proto = onnx.load(model.path, load_external_data=False)
        graph = self._proto.graph
        stored = {t.name: t for t in graph.initializer}
        files = _Files(graph, stored, model.path.parent)
        found = [_Layer.of(node, files) for node in graph.node]
        self.weights: dict[str, _Layer] = {layer.name: layer for layer in found if layer}
        self.vectors: dict[str, _Vector] = {
            name: _Vector(name=name, files=files) for name in stored if _is_vector(stored[name])
        }

    def opened(self, options: EngineOptions, vectors: Collection[str] = ()) -> OpenSession:
        """Load a copy of the graph with every weight as an input, and these vectors."""
        copy = OpenGraph(self.model)
        for layer in copy.weights.values():
            layer.open(copy._proto.graph)
        for name in vectors:
            copy.vectors[name].open(copy._proto.graph)
        _keep_used(copy._proto, self.model.path.parent)
        return OpenSession(copy._proto, self.model, options)


class _Files:
    """A graph's stored tensors, and the nodes that prepare them."""

    def __init__(
        self, graph: onnx.GraphProto, stored: Mapping[str, onnx.TensorProto], folder: Path
    ) -> None:
        self.stored, self._folder = stored, folder
        self._makers = {name: node for node in graph.node for name in node.output}

    def array(self, name: str) -> Array:
        """A stored tensor; through the Cast that widens it where there is one."""
        import onnx

        maker = self._makers.get(name)
        if maker is not None and maker.op_type == "Cast":
            name = maker.input[0]
        return onnx.numpy_helper.to_array(self.stored[name], base_dir=str(self._folder))

    def made_by(self, name: str, op_type: str) -> onnx.NodeProto | None:
        maker = self._makers.get(name)
        return maker if maker is not None and maker.op_type == op_type else None


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A weight in 8 bits, and the input that is rounded to 8 bits before it (engines.qdq)."""

    codes: str
    scales: str
    unsmoothing: str | None  # [features], what the input is multiplied by
    x: str  # as it was before

    @classmethod
    def of(cls, node: onnx.NodeProto, files: _Files) -> _Pair | None:
        turned = files.made_by(node.input[1], "Transpose") if len(node.input) > 1 else None
        weight = files.made_by(turned.input[0], "DequantizeLinear") if turned else None
        up = files.made_by(node.input[0], "DequantizeLinear") if weight else None
        down = files.made_by(up.input[0], "QuantizeLinear") if up else None
        if weight is None or down is None:
            return None
        smooth = files.made_by(down.input[0], "Mul")
        codes, scales = weight.input[0], weight.input[1]
        if smooth is None or not smooth.input[1].endswith(".unsmoothing"):
            return cls(codes=codes, scales=scales, unsmoothing=None, x=down.input[0])
        return cls(codes=codes, scales=scales, unsmoothing=smooth.input[1], x=smooth.input[0])

    def read(self, files: _Files) -> Array:
        """As the product takes it, smoothing undone: [in, out] f32."""
        codes = files.array(self.codes).astype(np.float32)
        values = (codes * files.array(self.scales)[:, None]).T
        if self.unsmoothing is not None:
            values = values * files.array(self.unsmoothing)[:, None]
        return np.ascontiguousarray(values)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One weight where it is used: a product by it, or a lookup of rows."""

    name: str
    node: onnx.NodeProto
    files: _Files
    pair: _Pair | None

    @classmethod
    def of(cls, node: onnx.NodeProto, files: _Files) -> _Layer | None:
        if node.op_type not in (*_PRODUCTS, *_LOOKUPS):
            return None
        pair = _Pair.of(node, files) if node.op_type == "MatMul" else None
        name = node.input[0] if node.op_type in _LOOKUPS else node.input[1]
        name = pair.codes if pair is not None else name
        if name not in files.stored or len(files.stored[name].dims) < 2:
            return None
        if node.op_type == "Gather" and "input_ids" not in node.input:
            return None
        for suffix in (".table", ".codes", ".codes8", ".T"):
            name = name.removesuffix(suffix)
        place = " (lookup)" if node.op_type in _LOOKUPS else ""
        return cls(name=name + place, node=node, files=files, pair=pair)

    def read(self) -> Array:
        """As the product takes it [in, out], or the lookup [tokens, features]; f32."""
        if self.pair is not None:
            return self.pair.read(self.files)
        if self.node.op_type in ("MatMul", "Gather"):
            return self.files.array(self.node.input[1 if self.node.op_type == "MatMul" else 0])
        rows = self._dequantized()
        return np.ascontiguousarray(rows.T) if self.node.op_type == "MatMulNBits" else rows

    def open(self, graph: onnx.GraphProto) -> None:
        """Rewire the node to an input that stands for the weight."""
        import onnx

        name = input_name(self.name)
        value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, None])
        graph.input.append(value)
        if self.node.op_type in _LOOKUPS:
            inputs, op_type = [name, self.node.input[1]], "Gather"
        else:
            x = self.pair.x if self.pair is not None else self.node.input[0]
            inputs, op_type = [x, name], "MatMul"
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
        codes, scales = self.files.array(parts[0]), self.files.array(parts[1]).astype(np.float32)
        zeros = self.files.array(parts[2]) if parts[2] else None
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


@dataclass(frozen=True, kw_only=True)
class _Vector:
    """One number a feature: a norm's scale or a bias, which some recipes fold factors into."""

    name: str
    files: _Files

    def read(self) -> Array:
        return self.files.array(self.name)

    def open(self, graph: onnx.GraphProto) -> None:
        import onnx

        name = input_name(self.name)
        graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None]))
        for node in graph.node:
            for i, read in enumerate(node.input):
                if read == self.name:
                    node.input[i] = name


def _is_vector(tensor: onnx.TensorProto) -> bool:
    is_float = tensor.data_type == tensor.FLOAT
    return is_float and len(tensor.dims) == 1 and tensor.name.endswith((".weight", ".bias"))


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
