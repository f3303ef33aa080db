"""Layers that a call may leave out: one graph, one set of weights, two depths.

Each run of consecutive layers goes into an If. One branch holds the layers; the other hands on what
the first of them would have read, and the run's caches as they came. ONNX Runtime packs weights
that only a branch reads as it packs others, and an Identity between a cache and itself, past and
present bound to one buffer, copies nothing: the whole pass costs what it cost before.

Invariants: with nothing skipped every value is computed by the same nodes as before, bit for bit.
A skipped layer's cache is not touched. Who doesn't know of the input skips nothing: false is its
default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from runtime.contract import SKIP_LAYERS
from runtime.layer_runs import runs

from ..matching import producer
from ..residual_stream import SKIP_NORMS, layer_inputs
from ..weights import constant

_BIAS = {"SkipSimplifiedLayerNormalization": 3, "SkipLayerNormalization": 4}  # input of a skip norm


class SkipLayersPass(ir.passes.InPlacePass):
    """Ensures that `skip_layers` [] bool leaves out these layers, all of them or none."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = sorted(layers)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if self._layers:
            stream = layer_inputs(model)
            skip = _switch(model.graph, np.array(False))
            for first, last in runs(self._layers):
                _wrap(model.graph, stream[first], stream[last + 1], skip)
            NameFixPass()(model)
        return ir.passes.PassResult(model, modified=bool(self._layers))


class SkipAnyLayerPass(ir.passes.InPlacePass):
    """Ensures that `skip_layers` [layers] bool leaves out any layers, each by its own entry."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        stream = layer_inputs(model)
        skips = _switch(graph, np.zeros(len(stream) - 1, bool))
        for layer, (before, behind) in enumerate(pairwise(stream)):
            index = constant(graph, f"skip_layers.{layer}", np.array([layer], np.int64))
            entry = ir.node("Gather", [skips, index])
            entry.outputs[0].type, entry.outputs[0].shape = skips.type, ir.Shape([1])
            graph.insert_before(graph[0], entry)
            _wrap(graph, before, behind, entry.outputs[0])
        NameFixPass()(model)
        return ir.passes.PassResult(model, modified=True)


def _switch(graph: ir.Graph, default: np.ndarray) -> ir.Value:
    """An input that need not be given."""
    value = ir.Value(
        name=SKIP_LAYERS.name,
        type=ir.TensorType(ir.DataType.BOOL),
        shape=ir.Shape(default.shape),
        const_value=ir.tensor(default, name=SKIP_LAYERS.name),
    )
    graph.inputs.append(value)
    graph.initializers.add(value)
    return value


@dataclass(frozen=True, kw_only=True)
class _Region:
    """The nodes of a run of layers, what leaves them, and what stands in for it."""

    nodes: list[ir.Node]
    results: list[ir.Value]  # the hidden state, as one value or as two that are added; the caches
    bypass: list[ir.Node]
    substitutes: list[ir.Value]  # the same, as the run receives them


def _wrap(graph: ir.Graph, before: ir.Value, behind: ir.Value, skip: ir.Value) -> None:
    region = _region(graph, before, behind)
    node = ir.Node("", "If", [skip], num_outputs=len(region.results))
    graph.insert_before(region.nodes[0], node)
    _redirect(graph, region, node)
    graph.remove(region.nodes)
    for name, nodes, values in (
        ("then_branch", region.bypass, region.substitutes),
        ("else_branch", region.nodes, region.results),
    ):
        node.attributes[name] = _branch(name, nodes, values, like=node.outputs)


def _region(graph: ir.Graph, before: ir.Value, behind: ir.Value) -> _Region:
    """Where the addition that ends a run is fused with the norm behind it, its two terms go through
    the If, so that the norm stays fused and rounds as it did.
    """
    norm = _skip_norm(behind)
    nodes = _between(graph, before, behind)
    inputs = {value.name: value for value in graph.inputs}
    made = {value for node in nodes for value in node.outputs}
    presents = [v for v in graph.outputs if v in made and str(v.name).startswith("present.")]
    pasts = [inputs[str(v.name).replace("present", "past_key_values", 1)] for v in presents]
    bypass, entering = ([], [before]) if norm is None else _as_terms(before, _bias(norm))
    region = _Region(
        nodes=nodes,
        results=[*([behind] if norm is None else _terms(norm)), *presents],
        bypass=bypass,
        substitutes=[*entering, *pasts],
    )
    _check_closed(region, made)
    return region


def _skip_norm(value: ir.Value) -> ir.Node | None:
    return producer(value, *SKIP_NORMS)


def _as_terms(value: ir.Value, bias: ir.Value | None) -> tuple[list[ir.Node], list[ir.Value]]:
    """Two values that with the bias have this sum, and the nodes that make them."""
    norm = _skip_norm(value)
    if norm is not None and bias is None and _bias(norm) is None:
        return [], _terms(norm)
    nodes = [ir.node("Sub", [value, value])]
    if bias is not None:  # of the run's last layer, which is left out
        nodes.append(ir.node("Sub", [nodes[0].outputs[0], bias]))
    for node in nodes:
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return nodes, [value, nodes[-1].outputs[0]]


def _terms(norm: ir.Node) -> list[ir.Value]:
    return [value for value in norm.inputs[:2] if value is not None]


def _bias(norm: ir.Node) -> ir.Value | None:
    place = _BIAS[norm.op_type]
    return norm.inputs[place] if len(norm.inputs) > place else None


def _between(graph: ir.Graph, before: ir.Value, behind: ir.Value) -> list[ir.Node]:
    """Nodes that read the run's input and that don't read its output."""
    source, sink = _skip_norm(before), _skip_norm(behind)
    within = _readers(graph, source.outputs if source is not None else [before])
    beyond = _readers(graph, sink.outputs if sink is not None else [behind])
    return [n for n in graph if n in within and n not in beyond and n is not sink]


def _readers(graph: ir.Graph, values: Sequence[ir.Value]) -> set[ir.Node]:
    """Nodes that depend on any of these."""
    reached, nodes = set(values), set[ir.Node]()
    for node in graph:
        if any(value in reached for value in node.inputs):
            nodes.add(node)
            reached.update(node.outputs)
    return nodes


def _check_closed(region: _Region, made: set[ir.Value]) -> None:
    nodes = set(region.nodes)
    for value in made - set(region.results):
        if value.is_graph_output() or any(use.node not in nodes for use in value.uses()):
            raise ir.passes.PreconditionError(
                f"{value.name} of a layer to skip is read behind it, besides its hidden state"
            )


def _redirect(graph: ir.Graph, region: _Region, node: ir.Node) -> None:
    """Let everything outside the region read the If's outputs; they take over the names."""
    nodes = {*region.nodes, *region.bypass}
    for inner, outer in zip(region.results, node.outputs, strict=True):
        outer.type, outer.shape = inner.type, inner.shape
        for use in list(inner.uses()):
            if use.node not in nodes:
                use.node.replace_input_with(use.idx, outer)
        for i, output in enumerate(graph.outputs):
            if output is inner:
                graph.outputs[i] = outer
        inner.name, outer.name = f"{inner.name}.kept", inner.name


def _branch(
    name: str, nodes: Sequence[ir.Node], results: Sequence[ir.Value], *, like: Sequence[ir.Value]
) -> ir.Attr:
    """A subgraph with these results; one from outside comes through an Identity of its own."""
    made = {value for node in nodes for value in node.outputs}
    own, outputs = list(nodes), []
    for value, model in zip(results, like, strict=True):
        if value not in made:  # a branch must make its results itself
            handed = ir.node("Identity", [value])
            handed.outputs[0].type, handed.outputs[0].shape = model.type, model.shape
            own.append(handed)
            value = handed.outputs[0]
        outputs.append(value)
    return ir.AttrGraph(name, ir.Graph([], outputs, nodes=own, name=name))
