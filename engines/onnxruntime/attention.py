"""Static-cache attention → GroupQueryAttention, in place on one shared buffer.

`TensorScatter` + `Attention` read the whole static cache under a mask. ONNX Runtime's
GroupQueryAttention appends to the same buffer and reads only the rows that are there; RoPE runs
inside where the graph's own could be matched, and stays outside where it could not.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..matching import attribute, drop_dead, producer, replace
from ..weights import constant
from .rotary import Rotary, match_rotary, tabulate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Site:
    """One attention of the portable graph."""

    node: ir.Node
    query: ir.Value  # [batch, heads, query_len, head_dim]
    key: ir.Value  # [batch, kv_heads, query_len, head_dim]
    value: ir.Value
    past_key: ir.Value
    past_value: ir.Value
    present_key: ir.Value
    present_value: ir.Value


class GroupQueryAttentionPass(ir.passes.InPlacePass):
    """Requires static-cache attention nodes; ensures that none is left."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        sites = [_site(n) for n in list(model.graph) if n.op_type == "Attention"]
        lengths = _Lengths(model.graph) if sites else None
        tables: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] = {}
        for site in sites:
            assert lengths is not None
            _lower(model, site, lengths, tables)
        if sites:
            drop_dead(model)
            model.graph.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=bool(sites))

    def ensures(self, model: ir.Model) -> None:
        left = [n.name for n in model.graph if n.op_type in ("Attention", "TensorScatter")]
        if left:
            raise ir.passes.PostconditionError(f"attention left over: {left[:3]}")


def _site(node: ir.Node) -> _Site:
    query, present_key, present_value = node.inputs[:3]
    scatter_key = producer(present_key, "TensorScatter")
    scatter_value = producer(present_value, "TensorScatter")
    if scatter_key is None or scatter_value is None or query is None:
        raise ir.passes.PreconditionError(f"{node.name}: attention without a static cache")
    return _Site(
        node=node,
        query=query,
        key=scatter_key.inputs[1],
        value=scatter_value.inputs[1],
        past_key=scatter_key.inputs[0],
        past_value=scatter_value.inputs[0],
        present_key=present_key,
        present_value=present_value,
    )  # type: ignore[arg-type]


class _Lengths:
    """`seqlens_k` [batch] i32 and `total_sequence_length` [] i32, made once at the graph's head."""

    def __init__(self, graph: ir.Graph) -> None:
        inputs = {v.name: v for v in graph.inputs}
        one = constant(graph, "outrider.one_i32", np.ones(1, np.int32))
        shape = ir.node("Shape", [inputs["input_ids"]], {"start": 1, "end": 2})
        query_len = ir.node("Cast", [shape.outputs[0]], {"to": ir.DataType.INT32})
        totals = ir.node("Add", [inputs["past_lengths"], query_len.outputs[0]])
        last = ir.node("Sub", [totals.outputs[0], one])
        most = ir.node("ReduceMax", [totals.outputs[0]], {"keepdims": 0})
        for value, name in ((last.outputs[0], "seqlens_k"), (most.outputs[0], "total_length")):
            value.name = name
            value.type = ir.TensorType(ir.DataType.INT32)
        first = graph[0]
        graph.insert_before(first, [shape, query_len, totals, last, most])
        self.seqlens_k, self.total = last.outputs[0], most.outputs[0]


def _lower(
    model: ir.Model,
    site: _Site,
    lengths: _Lengths,
    tables: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]],
) -> None:
    graph = model.graph
    rotary = _rotary_tables(model, site, tables)
    query, key = site.query, site.key
    attributes: dict[str, object] = {
        "num_heads": _heads(site.query),
        "kv_num_heads": _heads(site.key),
        "scale": float(attribute(site.node, "scale")),  # type: ignore[arg-type]
        "local_window_size": _window(site.node),
        "do_rotary": 0,
    }
    softcap = attribute(site.node, "softcap", 0.0)
    if softcap:
        attributes["softcap"] = float(softcap)  # type: ignore[arg-type]
    cos = sin = None
    if rotary is not None:
        (turned_query, turned_key), (cos, sin) = rotary
        query, key = turned_query.x, turned_key.x
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(turned_query.interleaved)}
    flat = [_flattened(graph, site.node, v) for v in (query, key, site.value)]
    attention = ir.node(
        "GroupQueryAttention",
        [*_packed(flat), site.past_key, site.past_value, lengths.seqlens_k, lengths.total, cos, sin],
        attributes,
        domain="com.microsoft",
        num_outputs=3,
    )
    graph.insert_before(site.node, attention)
    _replace_output(graph, site, attention)


def _window(node: ir.Node) -> int:
    """GroupQueryAttention counts the rows to the left of the query; 0 means no window."""
    window = int(node.metadata_props.get("outrider.window", "0"))
    return window if window else -1


def _heads(value: ir.Value) -> int:
    assert value.shape is not None
    return int(value.shape[1])  # type: ignore[arg-type]


def _rotary_tables(
    model: ir.Model,
    site: _Site,
    tables: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]],
) -> tuple[tuple[Rotary, Rotary], tuple[ir.Value, ir.Value]] | None:
    """RoPE of both query and key, if both were matched and turn by the same angles."""
    query, key = match_rotary(site.query), match_rotary(site.key)
    if query is None or key is None or (query.cos, query.sin) != (key.cos, key.sin):
        return None
    if query.interleaved != key.interleaved:
        return None
    angles = (query.cos, query.sin)
    if angles not in tables:
        max_context = int(site.past_key.shape[2])  # type: ignore[index,arg-type]
        try:
            cos, sin = tabulate(model, query, max_context)
        except ValueError as error:
            logger.info("RoPE stays outside attention: %s", error)
            return None
        index = len(tables)
        tables[angles] = (
            constant(model.graph, f"rotary.{index}.cos", cos),
            constant(model.graph, f"rotary.{index}.sin", sin),
        )
    return (query, key), tables[angles]


def _flattened(graph: ir.Graph, before: ir.Node, value: ir.Value) -> ir.Value:
    """[batch, heads, query_len, head_dim] → [batch, query_len, heads * head_dim].

    Undoes the model's own reshape and transpose where they are there, adds its own elsewhere.
    """
    assert value.shape is not None
    width = int(value.shape[1]) * int(value.shape[3])  # type: ignore[arg-type]
    transpose = producer(value, "Transpose")
    if transpose is not None and list(attribute(transpose, "perm")) == [0, 2, 1, 3]:  # type: ignore[call-overload]
        split = transpose.inputs[0]
        reshape = producer(split, "Reshape")
        flat = reshape.inputs[0] if reshape is not None else None
        if flat is not None and flat.shape is not None and len(flat.shape) == 3:
            if flat.shape[-1] == width:
                return flat
    else:
        back = ir.node("Transpose", [value], {"perm": [0, 2, 1, 3]})
        graph.insert_before(before, back)
        split = back.outputs[0]
    shape = constant(graph, f"outrider.flat.{width}", np.array([0, 0, width], np.int64))
    merge = ir.node("Reshape", [split, shape])
    merge.outputs[0].shape = ir.Shape([value.shape[0], value.shape[2], width])
    merge.outputs[0].type = value.type
    graph.insert_before(before, merge)
    return merge.outputs[0]


def _packed(flat: list[ir.Value]) -> list[ir.Value | None]:
    """One packed input where the three are the parts of one projection, in order."""
    split = producer(flat[0], "Split")
    if split is not None and list(split.outputs) == flat:
        return [split.inputs[0], None, None]
    return list(flat)


def _replace_output(graph: ir.Graph, site: _Site, attention: ir.Node) -> None:
    """The operator's flat output, given back in the shape that the traced graph expects."""
    old = site.node.outputs[0]
    flat, present_key, present_value = attention.outputs
    shape = old.shape
    assert shape is not None
    heads, head_dim = int(shape[1]), int(shape[3])  # type: ignore[arg-type]
    flat.shape = ir.Shape([shape[0], shape[2], heads * head_dim])
    flat.type = old.type
    for new, present in ((present_key, site.present_key), (present_value, site.present_value)):
        replace(present, new)
    for transpose in [use.node for use in old.uses()]:
        _bypass(transpose, flat)
    if not old.uses():
        return
    split_shape = constant(
        graph, f"outrider.heads.{heads}", np.array([0, 0, heads, head_dim], np.int64)
    )
    split = ir.node("Reshape", [flat, split_shape])
    back = ir.node("Transpose", [split.outputs[0]], {"perm": [0, 2, 1, 3]})
    graph.insert_before(site.node, [split, back])
    replace(old, back.outputs[0])


def _bypass(transpose: ir.Node, flat: ir.Value) -> None:
    """Transpose → Reshape to [batch, query_len, heads * head_dim] is the flat output itself."""
    if transpose.op_type != "Transpose" or list(attribute(transpose, "perm")) != [0, 2, 1, 3]:  # type: ignore[call-overload]
        return
    for use in list(transpose.outputs[0].uses()):
        out = use.node.outputs[0]
        if use.node.op_type == "Reshape" and out.shape is not None and len(out.shape) == 3:
            if flat.shape is not None and out.shape[-1] == flat.shape[-1]:
                replace(out, flat)
    if not transpose.outputs[0].uses():
        graph = transpose.graph
        assert graph is not None
        _remove_dead(transpose)


def _remove_dead(node: ir.Node) -> None:
    """Detach a node without readers, so that its input loses a use."""
    graph = node.graph
    assert graph is not None
    graph.remove(node, safe=True)
