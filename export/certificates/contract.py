"""That draft, target, accept and tokenizer are made for each other: read from the graphs.

The manifest could be right and a graph not, so the maps are compared where they are used: as
constants inside the draft and accept graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from runtime.bundle import Bundle, GraphName
from runtime.bundle_files import file_sha256
from runtime.manifest import EagleDraft
from runtime.text import Text

from .report import Certificate, Figures, judged
from .world import Array

_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul")
NAME = "contract"
CLAIM = "Draft, target, accept and tokenizer share one vocabulary, one map and one width."


def certify(bundle: Bundle) -> Certificate:
    """Vocabulary, d2t, hidden size and tokenizer hash."""
    figures, faults = Figures(), list[str]()
    for check in (_vocabulary, _map, _hidden_size, _tokenizer):
        found, fault = check(bundle)
        figures |= found
        faults += fault
    return judged(NAME, CLAIM, figures, faults)


Found = tuple[Figures, list[str]]


def _vocabulary(bundle: Bundle) -> Found:
    sizes = {"target": _axis(bundle.model_path("target"), "logits")}
    sizes["accept"] = _axis(bundle.model_path("accept"), "logits", of_input=True)
    figures: Figures = {"vocab_size": bundle.manifest.target.vocab_size}
    faults = [
        f"vocabulary of {name}.onnx: received {size}. Expected {figures['vocab_size']}"
        for name, size in sizes.items()
        if size != figures["vocab_size"]
    ]
    card, width = bundle.manifest.draft_model, bundle.manifest.draft_vocab_size
    sampler = _sampler(bundle)
    if sampler is not None:
        own = card.vocab_size if card and bundle.manifest.retokenized else width
        figures["draft_vocab_size"] = own
        q = _axis(bundle.model_path(sampler), "draft_step_probs")
        read = _axis(bundle.model_path("accept"), "draft_probs", of_input=True)
        if (q, read) != (own, width):
            faults.append(f"draft vocabulary: {sampler}.onnx gives {q}, accept.onnx reads {read}")
    return figures, faults


def _sampler(bundle: Bundle) -> GraphName | None:
    """The graph that draws drafts, if one does."""
    graphs = bundle.manifest.draft.graphs if bundle.manifest.draft else ()
    return "draft" if "draft" in graphs else "tail" if "tail" in graphs else None


def _map(bundle: Bundle) -> Found:
    if bundle.d2t is None:
        return {"d2t": "none: equal ids"}, []
    ids = np.arange(len(bundle.d2t)) + bundle.d2t
    inverse = np.full(bundle.manifest.target.vocab_size, len(ids))
    inverse[ids] = np.arange(len(ids))
    wanted: dict[GraphName, tuple[Array, ...]] = {"accept": (inverse, ids[None])}
    sampler = _sampler(bundle)
    if sampler is not None:
        wanted[sampler] = (bundle.d2t,)
    faults = [
        f"d2t: {name}.onnx holds another map than d2t.npy; the draft's tokens would be misread"
        for name, maps in wanted.items()
        if not all(_holds(bundle.model_path(name), one) for one in maps)
    ]
    return {"d2t": f"{len(ids)} tokens"}, faults


def _hidden_size(bundle: Bundle) -> Found:
    """A draft with a map was made for this target, whose embedding it reads: one width.

    A head reads the target's states, which must be as wide as it takes them.
    """
    card = bundle.manifest.draft_model
    width = _head_width(bundle.model_path("target"), bundle.manifest.target.vocab_size)
    if card is None:
        return {"hidden_size": width}, []
    draft = _head_width(bundle.model_path("draft"), card.vocab_size)
    faults = []
    if isinstance(bundle.manifest.draft, EagleDraft):
        faults += _state_faults(bundle, bundle.manifest.draft)
    elif bundle.d2t is not None and width != draft:
        faults.append(f"hidden size: received a draft of {draft}. Expected {width}, the target's")
    return {"hidden_size": width, "draft_hidden_size": draft}, faults


def _state_faults(bundle: Bundle, card: EagleDraft) -> list[str]:
    """Widths of what goes from the target to the head, and from one of its steps to the next."""
    target, draft = bundle.model_path("target"), bundle.model_path("draft")
    widths = {
        "features of target.onnx": (_axis(target, "features"), card.feature_width),
        "states of draft.onnx": (_axis(draft, "states", of_input=True), card.state_width),
        "next_state of draft.onnx": (_axis(draft, "next_state"), card.state_width),
    }
    if card.version == 3:
        read = _axis(bundle.model_path("fuse"), "features", of_input=True)
        widths["features of fuse.onnx"] = (read, card.feature_width)
    return [
        f"{name}: received a width of {received}. Expected {expected}"
        for name, (received, expected) in widths.items()
        if received != expected
    ]


def _head_width(path: Path, vocab: int) -> int | None:
    """Width of what the graph's head multiplies; None for a graph without such a layer."""
    graph = onnx.load(path, load_external_data=False).graph
    for node in graph.node:
        sizes = {a.name: a.i for a in node.attribute if a.name in ("N", "K")}
        if node.op_type == "MatMulNBits" and sizes.get("N") == vocab:
            return sizes["K"]
    multiplied = {n for node in graph.node if node.op_type in _PRODUCTS for n in node.input}
    shapes = [list(t.dims) for t in graph.initializer if t.name in multiplied and len(t.dims) == 2]
    widths = [sum(shape) - vocab for shape in shapes if vocab in shape]
    return widths[0] if widths else None


def _tokenizer(bundle: Bundle) -> Found:
    found = file_sha256(bundle.tokenizer_path)
    faults = []
    if found != bundle.manifest.tokenizer_sha256:
        faults.append("tokenizer.json: its hash is not the manifest's")
    text = Text(bundle.tokenizer_path, None, bundle.manifest.bos_token_id, ())
    largest = max(text.encode("The quick brown fox, 42."), default=0)
    if largest >= bundle.manifest.target.vocab_size:
        faults.append(f"tokenizer.json: gives token {largest}, beyond the vocabulary")
    return {"tokenizer_sha256": found}, faults


def _axis(path: Path, name: str, *, of_input: bool = False) -> int:
    """Size of a tensor's last axis."""
    graph = onnx.load(path, load_external_data=False).graph
    for value in graph.input if of_input else graph.output:
        if value.name == name:
            return int(value.type.tensor_type.shape.dim[-1].dim_value)
    return 0


def _holds(path: Path, wanted: Array) -> bool:
    """Whether the graph has this constant."""
    return any(np.array_equal(found, wanted) for found in _constants(path, wanted.shape))


def _constants(path: Path, shape: tuple[int, ...]) -> Iterator[Array]:
    graph = onnx.load(path, load_external_data=False).graph
    for tensor in _initializers(graph):
        if tuple(tensor.dims) == shape and tensor.data_type == onnx.TensorProto.INT64:
            yield numpy_helper.to_array(tensor, base_dir=str(path.parent))


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Of the graph and of those inside its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _initializers(attribute.g)
            elif attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
