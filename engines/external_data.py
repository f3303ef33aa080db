"""Write a graph and its weights, one weight at a time.

`onnx_ir.save` may hold a gigabyte of tensors in flight; here exactly one is made, written and let
go. Weights that say they have the same bytes as another are stored once, also across the graphs
of one bundle: that is how the draft reads the target's embedding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

ALIGNMENT = 4096  # page-aligned, so that an engine can map a weight
_BUFFER_TYPES = (
    ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT8, ir.DataType.UINT8,
    ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.DOUBLE,
)  # fmt: skip
THRESHOLD_BYTES = 1024  # smaller tensors stay inside the graph's file


@dataclass(kw_only=True)
class WeightStore:
    """Weights written so far in one directory: (kind of weight) → (file, offset, length)."""

    directory: Path
    places: dict[str, tuple[str, int, int]] = field(default_factory=dict)


def save(
    model: ir.Model,
    name: str,
    store: WeightStore,
    *,
    share: Callable[[str], str | None] = lambda _: None,
    progress: Callable[[str, int], None] = lambda _name, _bytes: None,
) -> Path:
    """Write `<name>.onnx` and `<name>.data` into the store's directory.

    share: gives an initializer's key in the store if another graph may hold the same bytes.
    """
    path = store.directory / f"{name}.onnx"
    data = store.directory / f"{name}.data"
    with data.open("wb") as file:
        for value in _largest_reuse_last(model.graph):
            tensor = value.const_value
            assert tensor is not None
            if tensor.nbytes < THRESHOLD_BYTES:
                value.const_value = ir.tensor(tensor.numpy(), name=value.name, dtype=tensor.dtype)
                continue
            value.const_value = _place(value, tensor, file, data.name, store, share)
            progress(str(value.name), tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())
    path.write_bytes(ir.to_proto(model).SerializeToString())
    if data.stat().st_size == 0:
        data.unlink()
    return path


def _largest_reuse_last(graph: ir.Graph) -> list[ir.Value]:
    """Weights in graph order, those that only repeat another's bytes after it."""
    values = [v for v in graph.initializers.values() if v.const_value is not None]
    return sorted(values, key=lambda v: "outrider.same_bytes_as" in v.metadata_props)


def _place(value, tensor, file, location, store, share):  # type: ignore[no-untyped-def]
    alias = value.metadata_props.get("outrider.same_bytes_as")
    own = str(value.name)
    keys = [key for key in (share(own), share(alias) if alias else None) if key]
    keys += [f"{location}:{alias}"] if alias else []
    place = next((store.places[key] for key in keys if key in store.places), None)
    if place is None:
        offset = -(-file.tell() // ALIGNMENT) * ALIGNMENT
        file.seek(offset)
        file.write(_raw(tensor))
        place = (location, offset, file.tell() - offset)
        for key in [*keys, f"{location}:{own}"]:
            store.places.setdefault(key, place)
    where, offset, length = place
    return ir.ExternalTensor(
        where, offset, length, tensor.dtype, shape=tensor.shape, name=own, base_dir=store.directory
    )


def _raw(tensor: ir.TensorProtocol) -> memoryview | bytes:
    """As the file has them; bf16, fp8 and packed 4 bits are no types that a buffer knows."""
    plain = tensor.dtype in _BUFFER_TYPES
    return memoryview(tensor.numpy().data).cast("B") if plain else tensor.tobytes()
