"""Where a factor of each input feature can go without a trace: into what makes the input.

A layer that reads x · diag(1/s) with weights · diag(s) computes the same. x comes so at no cost
where a norm makes it (its vectors are divided by s), a gate's product (the rows of the ungated
layer are), or attention (the rows of the values are; query heads that share a head of values share
its factors). Anything else, or a value that something else reads as well, has no fold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from .sites import TURNED, ReferenceGraph, Site

Array = NDArray[Any]
_NORMS = {"SimplifiedLayerNormalization": 1, "RMSNormalization": 1, "LayerNormalization": 1,
          "SkipSimplifiedLayerNormalization": 2, "SkipLayerNormalization": 2}  # fmt: skip
_SHIFTED = ("LayerNormalization", "SkipLayerNormalization")  # have a bias behind the scale


@dataclass(frozen=True, kw_only=True)
class Fold:
    """What is divided by s where a value's features are to be: vectors of a norm, by name, or rows
    of a product's weight (joined names are `a+b`) from `first` on.

    heads, readers: of values in attention, and how many query heads read each.
    """

    vectors: tuple[str, ...] = ()
    layer: str = ""
    first: int = 0
    heads: int = 1
    readers: int = 1

    def shared(self, features: Array) -> Array:
        """One number for each row or element that is divided: the mean over its readers."""
        return features.reshape(self.heads, self.readers, -1).mean(1).reshape(-1)

    def spread(self, factors: Array) -> Array:
        """One factor for each feature of the value."""
        return np.repeat(factors.reshape(self.heads, 1, -1), self.readers, axis=1).reshape(-1)


def find_folds(graph: ReferenceGraph, is_stored: Callable[[str], bool]) -> dict[str, Fold]:
    """By the value that is read. is_stored: whether a vector is the checkpoint's own."""
    finder = _Finder(graph, is_stored)
    values = {site.reads: site for site in graph.sites if not site.is_head}
    found = {name: finder.fold(site) for name, site in values.items()}
    return {name: fold for name, fold in found.items() if fold is not None}


class _Finder:
    def __init__(self, graph: ReferenceGraph, is_stored: Callable[[str], bool]) -> None:
        self._nodes, self._stored = graph.nodes, graph.stored
        self._is_stored = is_stored
        self._makers = {name: node for node in self._nodes for name in node.output if name}
        self._uses = Counter(name for node in self._nodes for name in node.input)
        self._uses.update(graph.outputs)
        self._sites = {site.weight: site for site in graph.sites if not site.is_head}
        self._readers = Counter(site.reads for site in self._sites.values())

    def fold(self, site: Site) -> Fold | None:
        node = self._makers.get(site.reads)
        if node is None or self._uses[site.reads] != self._readers[site.reads]:
            return None
        if site.reads != node.output[0]:
            return None
        if node.op_type in _NORMS:
            return self._norm(node, site)
        if node.op_type == "Mul":
            return next(self._gated(node, site), None)
        if node.op_type == "GroupQueryAttention":
            return self._values(node, site)
        return None

    def _norm(self, node: onnx.NodeProto, site: Site) -> Fold | None:
        scale = _NORMS[node.op_type]
        names = list(node.input[scale : scale + 1 + (node.op_type in _SHIFTED)])
        vectors = tuple(name for name in names if name)
        usable = all(self._is_own_vector(name, site.features) for name in vectors)
        return Fold(vectors=vectors) if usable else None

    def _is_own_vector(self, name: str, size: int) -> bool:
        tensor = self._stored.get(name)
        if tensor is None or list(tensor.dims) != [size] or self._uses[name] != 1:
            return False
        return self._is_stored(name)

    def _gated(self, node: onnx.NodeProto, site: Site) -> Iterator[Fold]:
        """The factor that is a product by itself; the other one went through an activation."""
        for name in node.input:
            rows = self._rows(name)
            if rows is not None and rows[2] == site.features:
                yield Fold(layer=rows[0], first=rows[1])

    def _values(self, node: onnx.NodeProto, site: Site) -> Fold | None:
        sizes = {a.name: a.i for a in node.attribute}
        heads, values = sizes["num_heads"], sizes["kv_num_heads"]
        width = site.features // heads
        packed = not node.input[2]
        rows = self._rows(node.input[0] if packed else node.input[2])
        if rows is None or rows[2] != (heads + 2 * values if packed else values) * width:
            return None
        first = rows[1] + ((heads + values) * width if packed else 0)
        return Fold(layer=rows[0], first=first, heads=values, readers=heads // values)

    def _rows(self, name: str) -> tuple[str, int, int] | None:
        """(weight, first row, rows) of the product that gives a value which nothing else reads."""
        node = self._makers.get(name)
        if node is None or self._uses[name] != 1:
            return None
        first, count = 0, None
        if node.op_type == "Split":
            sizes = self._split_sizes(node)
            index = list(node.output).index(name)
            first, count = sum(sizes[:index]), sizes[index] if sizes else None
            if self._uses[node.input[0]] != 1 or count is None:
                return None
            node = self._makers.get(node.input[0])
        if node is None or node.op_type != "MatMul":
            return None
        site = self._sites.get(node.input[1].removesuffix(TURNED))
        return None if site is None else (site.weight, first, count or site.rows)

    def _split_sizes(self, node: onnx.NodeProto) -> Sequence[int]:
        if len(node.input) < 2 or node.input[1] not in self._stored:
            return []
        sizes = onnx.numpy_helper.to_array(self._stored[node.input[1]])
        return [int(size) for size in sizes]
