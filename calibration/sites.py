"""Where a full-precision graph multiplies by a weight: what calibration watches and solves.

The names are those that the graph's weights have before they are quantized, so that what is solved
here is found again when the quantized graph is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from runtime.contract import TensorSpec
from runtime.errors import EngineError

Array = NDArray[Any]
TURNED = ".T"  # the graph holds weights as a product takes them: [in, out]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One product x @ weight.T; several may read the same value."""

    weight: str  # joined ones are `a+b`
    reads: str  # the graph's value, [batch, rows, features] f32
    features: int
    rows: int  # of the weight
    is_head: bool  # gives the logits


class ReferenceGraph:
    """A full-precision graph on disk: its sites, and their weights one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._proto = onnx.load(path, load_external_data=False)
        self.stored = {t.name: t for t in self._proto.graph.initializer}
        self.sites = list(self._find())
        if not self.sites:
            raise EngineError(
                f"{path.name}: received a graph without a product by a weight. Expected the fp32 "
                "graph of a decoder."
            )

    @property
    def nodes(self) -> Sequence[onnx.NodeProto]:
        return self._proto.graph.node

    @property
    def outputs(self) -> list[str]:
        return [value.name for value in self._proto.graph.output]

    def weight(self, site: Site) -> Array:
        """[out, in] f32, finite. Raises EngineError naming the layer."""
        tensor = self.stored[site.weight + TURNED]
        values = onnx.numpy_helper.to_array(tensor, base_dir=str(self.path.parent)).T
        if not np.isfinite(values).all():
            raise EngineError(
                f"{site.weight}: received weights that are not finite. Expected numbers; the "
                "checkpoint is damaged."
            )
        return np.ascontiguousarray(values, np.float32)

    def watching(self, sites: Sequence[Site]) -> Path:
        """A variant beside the graph that also gives what `sites` read; the caller removes it."""
        variant = onnx.ModelProto()
        variant.CopyFrom(self._proto)
        for site in {site.reads: site for site in sites}.values():
            shape = ["batch", "query_len", site.features]
            value = onnx.helper.make_tensor_value_info(site.reads, onnx.TensorProto.FLOAT, shape)
            variant.graph.output.append(value)
        path = self.path.with_suffix(".watched.onnx")
        path.write_bytes(variant.SerializeToString())
        return path

    def _find(self) -> Iterator[Site]:
        logits = next(o for o in self._proto.graph.output if o.name == "logits")
        vocab = logits.type.tensor_type.shape.dim[-1].dim_value
        for node in self._proto.graph.node:
            tensor = self.stored.get(node.input[1]) if node.op_type == "MatMul" else None
            if tensor is None or len(tensor.dims) != 2 or not tensor.name.endswith(TURNED):
                continue
            features, rows = tensor.dims
            yield Site(
                weight=tensor.name.removesuffix(TURNED),
                reads=node.input[0],
                features=features,
                rows=rows,
                is_head=rows == vocab,
            )


def watched(site: Site) -> TensorSpec:
    """The output that `watching` adds."""
    return TensorSpec(name=site.reads, dtype="float32", axes=("batch", "query_len", site.features))
