"""Where a decoder's layers meet: the one value that everything behind a layer reads.

The hidden state before layer i, x_i, carries all that the layers before it have to say, so every
path from the tokens to the logits goes through it. Such values are found by that property alone,
whatever the norms, whether attention and MLP stand side by side or one behind the other.

A norm fused with the addition before it makes two values, the sum and its norm; the norm is read
from the sum, so it counts as lying behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from runtime.errors import UnsupportedModel

from .matching import producer

SKIP_NORMS = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
_SUM = 3  # output of a skip norm
_ATTENTIONS = ("GroupQueryAttention", "Attention")


def layer_inputs(model: ir.Model) -> list[ir.Value]:
    """x_0 … x_N of a lowered decoder of N layers: what layer i reads, and what the last one gives.

    Raises UnsupportedModel where layers don't meet in one value, made by an addition.
    """
    attentions = _attentions(model)
    stream = _Stream(model)
    found = [stream.last_before(node) for node in attentions]
    found.append(stream.last_sum())
    if len(set(found)) != len(found) or any(not stream.is_sum(x) for x in found[1:]):
        raise UnsupportedModel(
            "layer-skip: received a model whose layers don't add to one stream. Expected a hidden "
            "state that each layer adds to; use --draft ngram or a draft model."
        )
    return found


def _attentions(model: ir.Model) -> list[ir.Node]:
    """One a layer, in the order of the caches."""
    present = {v: v.producer() for v in model.graph.outputs if v.name != "logits"}
    nodes = list(dict.fromkeys(_attention_of(node) for node in present.values() if node))
    return [node for node in nodes if node is not None]


def _attention_of(node: ir.Node) -> ir.Node | None:
    """The attention that writes a cache itself, or reads what a TensorScatter wrote."""
    if node.op_type in _ATTENTIONS:
        return node
    readers = (use.node for value in node.outputs for use in value.uses())
    return next((reader for reader in readers if reader.op_type in _ATTENTIONS), None)


class _Stream:
    """Values that every path from the tokens to the logits goes through, in order."""

    def __init__(self, model: ir.Model) -> None:
        graph = model.graph
        (logits,) = [v for v in graph.outputs if v.name == "logits"]
        self._order = {node: i for i, node in enumerate(graph)}
        self._hidden = _descendants(graph)
        self._values = self._without_detours(logits)

    def last_before(self, attention: ir.Node) -> ir.Value:
        """The last one that this attention depends on."""
        ancestors = self._ancestors([v for v in attention.inputs if v is not None])
        found = [value for value in self._values if value in ancestors]
        if not found:
            raise UnsupportedModel(
                "layer-skip: received a layer that reads no token. Expected a plain decoder; "
                "use --draft ngram or a draft model."
            )
        return found[-1]

    def last_sum(self) -> ir.Value:
        found = [value for value in self._values if self.is_sum(value)]
        return found[-1] if found else self._values[-1]

    def is_sum(self, value: ir.Value) -> bool:
        """Whether two hidden states were added to make it."""
        made = _behind_reshapes(value)
        node = made.producer() if made is not None else None
        if made is None or node is None:
            return False
        is_sum = node.op_type == "Add" or (node.op_type in SKIP_NORMS and made.index() == _SUM)
        return is_sum and all(v in self._hidden for v in node.inputs[:2])

    def _without_detours(self, logits: ir.Value) -> list[ir.Value]:
        """A value is on every path if no edge leads past it, from a value before to one behind."""
        on_path = sorted(self._ancestors([logits]), key=self._place)
        place = {value: i for i, value in enumerate(on_path)}
        found, reach = [], 0  # reach: the furthest place that an earlier value is read at
        readers: dict[ir.Value, int] = {}
        for value in on_path:
            for read in self._read_by(value):
                readers[read] = place[value]
        for value in on_path:
            if reach <= place[value]:
                found.append(value)
            reach = max(reach, readers.get(value, 0))
        return found

    def _ancestors(self, values: Sequence[ir.Value]) -> set[ir.Value]:
        """Hidden values that these depend on, and themselves."""
        found: set[ir.Value] = set()
        waiting = [v for v in values if v in self._hidden]
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                waiting += self._read_by(value)
        return found

    def _read_by(self, value: ir.Value) -> Iterator[ir.Value]:
        node = value.producer()
        if node is None:
            return
        if node.op_type in SKIP_NORMS and value.index() == 0:
            yield node.outputs[_SUM]
            return
        yield from (v for v in node.inputs if v is not None and v in self._hidden)

    def _place(self, value: ir.Value) -> tuple[int, int]:
        """Order of the graph; of a skip norm the sum comes first."""
        node = value.producer()
        return (-1, 0) if node is None else (self._order[node], -(value.index() or 0))


def _behind_reshapes(value: ir.Value | None) -> ir.Value | None:
    """What a reshape only hands on: OPT takes the rows of a batch together."""
    node = producer(value, "Reshape")
    return value if node is None else _behind_reshapes(node.inputs[0])


def _descendants(graph: ir.Graph) -> set[ir.Value]:
    """Values that say something of the tokens, not only how many they are."""
    found = {v for v in graph.inputs if v.name == "input_ids"}
    for node in graph:
        if node.op_type != "Shape" and any(v in found for v in node.inputs):
            found.update(node.outputs)
    return found
