"""Static-cache attention → GroupQueryAttention, in place on one shared buffer.

`TensorScatter` + `Attention` read the whole static cache under a mask. ONNX Runtime's
GroupQueryAttention appends to the same buffer and reads only the rows that are there; RoPE runs
inside where the graph's own could be matched, and stays outside where it could not. Heads of a size
that the operator doesn't take stay with the standard operators, which compute the same, slower.

Where the query rows are a tree (`visible` among the inputs), what a row may not see is a bias of
−∞, and RoPE turns by the rows' depths.

A query of one row runs another kernel than rows together do, and differs by 1e-7: `rows_alike`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from runtime.contract import MOST_TREE_NODES

from ..matching import attribute, drop_dead, last_dim, producer, replace, slice_of
from ..weights import constant
from .rotary import Rotary, match_rotary, tabulate
from .tree_attention import TreeAttention

logger = logging.getLogger(__name__)

# What ONNX Runtime 1.32's CPU kernel takes: head sizes in eights; with RoPE inside, head and rotary
# sizes in sixteens.
_HEAD_MULTIPLE = 8
_ROTARY_MULTIPLE = 16


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
    """Requires that attention has static caches; ensures that none of a fitting size is left."""

    def requires(self, model: ir.Model) -> None:
        for node in _fitting(model):
            _site(node)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        sites = [_site(node) for node in _fitting(model)]
        lengths = _Lengths(model.graph) if sites else None
        tree = TreeAttention.of(model.graph, lengths.total) if lengths else None
        tables: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] = {}
        for site in sites:
            assert lengths is not None
            _lower(model, site, lengths, tables, tree)
        if sites:
            drop_dead(model)
            model.graph.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=bool(sites))

    def ensures(self, model: ir.Model) -> None:
        left = [node.name for node in _fitting(model)]
        if left:
            raise ir.passes.PostconditionError(f"attention left over: {left[:3]}")


def _fitting(model: ir.Model) -> list[ir.Node]:
    """Attention nodes whose heads have a size that GroupQueryAttention takes."""
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    return [node for node in nodes if _head_dim(node.inputs[0]) % _HEAD_MULTIPLE == 0]


def _head_dim(value: ir.Value | None) -> int:
    size = last_dim(value) if value is not None else None
    if size is None:
        raise ir.passes.PreconditionError("attention over heads of unknown size")
    return size


def _site(node: ir.Node) -> _Site:
    query, present_key, present_value = _inputs(node)[:3]
    scatter_key, scatter_value = (
        producer(v, "TensorScatter") for v in (present_key, present_value)
    )
    if scatter_key is None or scatter_value is None:
        raise ir.passes.PreconditionError(f"{node.name}: attention without a static cache")
    (past_key, key), (past_value, value) = _inputs(scatter_key)[:2], _inputs(scatter_value)[:2]
    return _Site(
        node=node,
        query=query,
        key=key,
        value=value,
        past_key=past_key,
        past_value=past_value,
        present_key=present_key,
        present_value=present_value,
    )


def _inputs(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


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
    tree: TreeAttention | None,
) -> None:
    graph = model.graph
    rotary = _rotary_tables(model, site, tables)
    query, key = site.query, site.key
    attributes: dict[str, object] = {
        "num_heads": _heads(site.query),
        "kv_num_heads": _heads(site.key),
        "scale": float(attribute(site.node, "scale")),  # type: ignore[arg-type]
        "local_window_size": _window(site.node, tree),
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
    branches = tree.inputs(_window_rows(site.node), turns=rotary is not None) if tree else []
    attention = ir.node(
        "GroupQueryAttention",
        [
            *_packed(flat),
            site.past_key,
            site.past_value,
            lengths.seqlens_k,
            lengths.total,
            cos,
            sin,
            *branches,
        ],
        attributes,
        domain="com.microsoft",
        num_outputs=3,
    )
    graph.insert_before(site.node, attention)
    _replace_output(graph, site, attention)


def _window_rows(node: ir.Node) -> int:
    """Cache rows that a query sees, itself included; 0: all before it."""
    return int(node.metadata_props.get("outrider.window", "0"))


def _window(node: ir.Node, tree: TreeAttention | None) -> int:
    """GroupQueryAttention counts rows, so a tree's may stand further apart than their positions.

    Its bias then says exactly what is within the window.
    """
    window = _window_rows(node)
    if not window:
        return -1
    return window + MOST_TREE_NODES if tree else window


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
    if query.interleaved != key.interleaved or _head_dim(site.query) % _ROTARY_MULTIPLE:
        return None
    if query.rotary_dim % _ROTARY_MULTIPLE:
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
        if flat is not None and _is_flat(flat, width):
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


def _is_flat(value: ir.Value, width: int | None) -> bool:
    """[batch, query_len, width]"""
    return value.shape is not None and len(value.shape) == 3 and last_dim(value) == width


def _packed(flat: list[ir.Value]) -> list[ir.Value | None]:
    """One packed input where the three are the parts of one projection, in order."""
    split = producer(flat[0], "Split")
    if split is not None and list(split.outputs) == flat:
        return [split.inputs[0], None, None]
    parts = [part for part in map(slice_of, flat) if part is not None]
    if len(parts) == len(flat) and len({part[0] for part in parts}) == 1:
        source, ends = parts[0][0], [0, *(part[2] for part in parts)]
        adjacent = all(p[1] == end and p[3] == 1 for p, end in zip(parts, ends, strict=False))
        if adjacent and ends[-1] == last_dim(source):
            return [source, None, None]
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
        if use.node.op_type == "Reshape" and _is_flat(out, last_dim(flat)):
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
