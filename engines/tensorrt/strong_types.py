"""From f32 to the graph's own type, strongly: every tensor's type is in the graph, none is guessed.

What comes from a weight or a cache is computed in the narrow type; what comes from positions alone
(the angles of RoPE, masks) stays f32 up to where it meets them, since an fp16 position is wrong
beyond 2,048. Norms compute in f32 inside (`stash_type`). At the boundary the contract's types hold:
logits and features leave as f32, caches are narrow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from runtime.errors import BuildError

from ..matching import drop_dead
from ..weights import array, lazy, shape

FLOAT = ir.DataType.FLOAT
NARROW = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
WIDENS = "outrider.widens"  # metadata of a cast that is meant to go to a wider type
_NORMS = ("RMSNormalization", "LayerNormalization")
_CACHES = ("past_key_values.", "present.")


class StrongTypesPass(ir.passes.InPlacePass):
    """Requires an f32 graph; ensures that nothing behind a weight is f32 but marked outputs."""

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__()
        self.dtype = dtype

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        narrow = _narrow_values(model.graph)
        if not any(_is_computed_with(value) for value in narrow):
            return ir.passes.PassResult(model, modified=False)
        typing = _Typing(graph=model.graph, dtype=self.dtype, narrow=narrow)
        typing.apply()
        drop_dead(model)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        if widened := widening_casts(model):
            raise ir.passes.PostconditionError(
                f"casts to a wider type that nobody asked for: {widened[:3]}"
            )


def widening_casts(model: ir.Model) -> list[str]:
    """Casts from a narrow float to f32 that aren't marked as meant."""
    return [
        str(node.outputs[0].name)
        for node in model.graph.all_nodes()
        if node.op_type == "Cast" and WIDENS not in node.metadata_props and _widens(node)
    ]


def meant_casts(model: ir.Model) -> int:
    """Casts to f32 that the graph asks for: marked outputs, and each norm's own inside."""
    nodes = list(model.graph.all_nodes())
    norms = [n for n in nodes if n.op_type in _NORMS and _is_narrow(n.inputs[0])]
    return len(norms) + sum(WIDENS in node.metadata_props for node in nodes)


def _widens(node: ir.Node) -> bool:
    return _is_narrow(node.inputs[0]) and node.attributes["to"].as_int() == FLOAT


def _is_narrow(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in NARROW.values()


def _narrow_values(graph: ir.Graph) -> set[ir.Value]:
    """f32 values that a weight or a float input went into."""
    narrow = {v for v in graph.initializers.values() if _is_checkpoint_weight(v)}
    narrow |= {v for v in graph.inputs if v.dtype == FLOAT}
    for node in graph:
        if any(v in narrow for v in node.inputs):
            narrow |= {v for v in node.outputs if v.dtype in (FLOAT, None)}
            narrow -= {v for v in node.outputs if node.op_type in ("Shape", "ArgMax", "Size")}
    return narrow


def _is_computed_with(value: ir.Value) -> bool:
    """An f32 input that is only cast, as the contract's are, is typed already."""
    return any(use.node.op_type != "Cast" for use in value.uses())


def _is_checkpoint_weight(value: ir.Value) -> bool:
    """Made when written; the trace's own small tensors (inverse frequencies) are there already."""
    return value.dtype == FLOAT and isinstance(value.const_value, ir.LazyTensor)


@dataclass(kw_only=True)
class _Typing:
    graph: ir.Graph
    dtype: ir.DataType
    narrow: set[ir.Value]
    _narrowed: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def apply(self) -> None:
        given = [v for v in self.graph.inputs if v in self.narrow]
        outputs = [v for v in self.graph.outputs if v in self.narrow]
        for node in list(self.graph):
            self._node(node)
        for value in given:
            self._input(value)
        for value in outputs:
            if not str(value.name).startswith(_CACHES):
                self._widen(value)

    def _node(self, node: ir.Node) -> None:
        """Every float that goes into a narrow node is narrow; so is what comes out."""
        inside = [v for v in node.outputs if v in self.narrow]
        if not inside and not any(v in self.narrow for v in node.inputs):
            return
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == FLOAT and not self._typed_by_its_node(value):
                node.replace_input_with(index, self._as_narrow(value))
        if node.op_type == "Cast" and node.attributes["to"].as_int() == FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", self.dtype)
        for value in inside:
            # What nobody reads has the type that its operator gives it, such as a norm's f32 mean.
            if value.uses() or value.is_graph_output():
                value.type = ir.TensorType(self.dtype)
            else:
                value.type = value.shape = None

    def _typed_by_its_node(self, value: ir.Value) -> bool:
        """Narrow by the time its own node has been through."""
        return value in self.narrow and not value.is_initializer()

    def _as_narrow(self, value: ir.Value) -> ir.Value:
        if value not in self._narrowed:
            make = self._weight if _is_checkpoint_weight(value) else self._other
            self._narrowed[value] = make(value)
        return self._narrowed[value]

    def _weight(self, value: ir.Value) -> ir.Value:
        numpy = self.dtype.numpy()
        return lazy(
            self.graph,
            f"{value.name}.{self.dtype.name.lower()}",
            lambda: _rounded(array(value), numpy, str(value.name)),
            self.dtype,
            shape(value),
        )

    def _other(self, value: ir.Value) -> ir.Value:
        """A small constant of its own, or a cast where an f32 part of the graph ends."""
        name = f"{value.name}.{self.dtype.name.lower()}"
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None:
            rounded = _rounded(tensor.numpy(), self.dtype.numpy(), str(value.name))
            return _constant(self.graph, name, rounded, self.dtype)
        cast = ir.node("Cast", [value], {"to": self.dtype})
        cast.outputs[0].shape, cast.outputs[0].type = value.shape, ir.TensorType(self.dtype)
        producing = value.producer()
        assert producing is not None
        self.graph.insert_after(producing, cast)
        return cast.outputs[0]

    def _input(self, value: ir.Value) -> None:
        """Caches are narrow themselves; states come in as the contract has them."""
        if str(value.name).startswith(_CACHES):
            value.type = ir.TensorType(self.dtype)
            return
        cast = ir.node("Cast", [value], {"to": self.dtype})
        cast.outputs[0].shape, cast.outputs[0].type = value.shape, ir.TensorType(self.dtype)
        value.replace_all_uses_with(cast.outputs[0])
        cast.replace_input_with(0, value)
        self.graph.insert_before(self.graph[0], cast)

    def _widen(self, value: ir.Value) -> None:
        cast = ir.node("Cast", [value], {"to": FLOAT}, metadata_props={WIDENS: "contract"})
        out = cast.outputs[0]
        out.shape, out.type = value.shape, ir.TensorType(FLOAT)
        self.graph.append(cast)
        position = list(self.graph.outputs).index(value)
        name = value.name
        value.name = f"{name}.{self.dtype.name.lower()}"
        out.name = name
        self.graph.outputs[position] = out


def _rounded(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Raises BuildError where a finite number has none in the narrow type."""
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if np.isfinite(values).all() and not np.isfinite(rounded.astype(np.float32)).all():
        raise BuildError(
            f"{name}: received values up to {np.abs(values).max():.4g}. Expected at most "
            f"{65504 if dtype == np.float16 else 3.39e38:.4g}, the largest {dtype}; build with "
            "--precision bf16, which engines of --backend tensorrt-rtx have."
        )
    return rounded


def _constant(graph: ir.Graph, name: str, values: np.ndarray, dtype: ir.DataType) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(values, dtype=dtype, name=name)
        value = ir.Value(
            name=name, shape=ir.Shape(values.shape), type=ir.TensorType(dtype), const_value=tensor
        )
        graph.register_initializer(value)
    return graph.initializers[name]
