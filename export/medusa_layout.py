"""Which tensors Medusa heads have, under one set of names whatever the file calls them.

    FasterDecoding   {head}.{layer}.linear.{weight,bias}, {head}.{layers}.weight
    vLLM             blocks.{head}.layers.{layer}.{weight,bias}, lm_heads.{head}.weight, token_map

Head and layer counts are read off the names: published configurations often disagree with them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from runtime.errors import CheckpointError

from .names import shorten

TOKEN_MAP = "token_map"
_PREFIX = re.compile(r"medusa_heads?\.")
_LAYER = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
_HEAD = re.compile(r"(?:(\d+)\.(\d+)|lm_heads\.(\d+))\.weight")


@dataclass(frozen=True, kw_only=True)
class MedusaLayout:
    num_heads: int
    num_layers: int  # residual blocks of each head
    stored: dict[str, str]  # canonical name → the file's
    has_outputs: bool  # each head has its own output matrix (version 1)
    has_biases: bool

    def names(self) -> frozenset[str]:
        """Canonical names of every parameter; a bias that the file lacks is zero."""
        return frozenset(self.stored) | {
            layer_name(i, j, "bias") for i in range(self.num_heads) for j in range(self.num_layers)
        }


def layer_name(head: int, layer: int, part: str) -> str:
    return f"heads.{head}.layers.{layer}.{part}"


def output_name(head: int) -> str:
    return f"heads.{head}.lm_head.weight"


def is_medusa_name(name: str) -> bool:
    return name == TOKEN_MAP or _canonical(name) is not None


def read_layout(names: Collection[str], where: str) -> MedusaLayout:
    """Raises CheckpointError where names are foreign, or a head lacks what another has."""
    found = {name: _canonical(name) for name in names if name != TOKEN_MAP}
    foreign = sorted(name for name, key in found.items() if key is None)
    if foreign or not found:
        raise CheckpointError(
            f"{where}: received {shorten(foreign) or 'no tensors'}. Expected names of Medusa heads "
            "such as 0.0.linear.weight or blocks.0.layers.0.weight; the file is of another kind."
        )
    stored = {key: name for name, key in sorted(found.items()) if key is not None}
    layout = _counted(stored, found)
    _check_whole(layout, where)
    return layout


def _canonical(name: str) -> str | None:
    name = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
    if layer := _LAYER.fullmatch(name):
        own_head, own_layer, head, index, part = layer.groups()
        return layer_name(int(own_head or head), int(own_layer or index), part)
    if output := _HEAD.fullmatch(name):
        return output_name(int(output[1] or output[3]))
    return None


def _counted(stored: dict[str, str], found: Collection[str]) -> MedusaLayout:
    parts = [key.split(".") for key in stored]
    return MedusaLayout(
        num_heads=1 + max(int(part[1]) for part in parts),
        num_layers=1 + max((int(part[3]) for part in parts if part[2] == "layers"), default=-1),
        stored=stored,
        has_outputs=any(part[2] == "lm_head" for part in parts),
        has_biases=any(part[-1] == "bias" for part in parts),
    )


def _check_whole(layout: MedusaLayout, where: str) -> None:
    heads, layers = range(layout.num_heads), range(layout.num_layers)
    parts = ("weight", "bias") if layout.has_biases else ("weight",)
    expected = {layer_name(i, j, part) for i in heads for j in layers for part in parts}
    if layout.has_outputs:
        expected |= {output_name(i) for i in heads}
    missing = sorted(expected - layout.stored.keys()) or _gaps(layout)
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} missing: {shorten(missing)}. Expected the same tensors in "
            f"each of {layout.num_heads} heads of {layout.num_layers} layers; the file is "
            "incomplete: download it again."
        )


def _gaps(layout: MedusaLayout) -> list[str]:
    """Layers that an output's own place in its head, `{head}.{layers}.weight`, says there are."""
    places = [
        int(match[2])
        for i in range(layout.num_heads)
        if (match := _HEAD.search(layout.stored.get(output_name(i), ""))) and match[2]
    ]
    last = max(places, default=layout.num_layers)
    return [layer_name(0, j, "weight") for j in range(layout.num_layers, last)]
