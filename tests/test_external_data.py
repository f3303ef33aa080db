"""Weights on disk: made one at a time, stored once, found again by onnx and by the engine."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from helpers_build import places
from onnx import numpy_helper

from engines.external_data import ALIGNMENT, THRESHOLD_BYTES, WeightStore, save
from engines.weights import constant, joined, lazy, transposed

ROWS, COLUMNS = 24, 40  # 3,840 bytes in f32: beyond the threshold, no multiple of a page
FLOAT = ir.DataType.FLOAT


class Maker:
    """Makes weights on demand and knows which of them are still held."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.most_alive = 0
        self._alive: list[weakref.ref[np.ndarray]] = []

    def weight(self, graph: ir.Graph, name: str, seed: int = 0) -> ir.Value:
        return lazy(graph, name, lambda: self._make(name, seed), FLOAT, (ROWS, COLUMNS))

    def _make(self, name: str, seed: int) -> np.ndarray:
        made = values(seed)
        self.made.append(name)
        self._alive.append(weakref.ref(made))
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self._alive))
        return made


def values(seed: int) -> np.ndarray:
    """[ROWS, COLUMNS] f32."""
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS), np.float32)


def graph_of(*more: ir.Node) -> ir.Graph:
    """y = Identity(x) and whatever else."""
    x, y = ir.val("x", FLOAT, [ROWS, COLUMNS]), ir.val("y", FLOAT, [ROWS, COLUMNS])
    nodes = [ir.node("Identity", [x], outputs=[y]), *more]
    return ir.Graph([x], [y], nodes=nodes, opset_imports={"": 20}, name="test")


def append_sum(graph: ir.Graph, weights: list[ir.Value]) -> ir.Model:
    """y = x + all weights: every one of them counts."""
    (total,) = graph.inputs
    for weight in weights:
        node = ir.node("Add", [total, weight])
        graph.append(node)
        (total,) = node.outputs
    (y,) = graph.outputs
    total.shape, total.type = y.shape, y.type
    graph.outputs[0] = total
    graph.remove(graph[0])
    total.name = "y"
    return ir.Model(graph, ir_version=10)


def summing(maker: Maker, **seeds: int) -> ir.Model:
    graph = graph_of()
    return append_sum(graph, [maker.weight(graph, name, seed) for name, seed in seeds.items()])


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return y


def test_one_weight_is_made_at_a_time_and_once(tmp_path: Path) -> None:
    maker = Maker()
    model = summing(maker, a=1, b=2, c=3, d=4)
    assert maker.made == []
    written: list[tuple[str, int]] = []
    store = WeightStore(directory=tmp_path)
    save(model, "graph", store, progress=lambda name, size: written.append((name, size)))
    assert maker.made == ["a", "b", "c", "d"]
    assert maker.most_alive == 1
    assert written == [(name, 4 * ROWS * COLUMNS) for name in "abcd"]


def test_derived_weights_hold_no_more_than_their_parts(tmp_path: Path) -> None:
    maker, graph = Maker(), graph_of()
    parts = [maker.weight(graph, name, i) for i, name in enumerate("abc")]
    (x,) = graph.inputs
    product = ir.node("MatMul", [x, transposed(graph, joined(graph, parts))])
    product.outputs[0].shape, product.outputs[0].type = ir.Shape([ROWS, 3 * ROWS]), x.type
    product.outputs[0].name = "y"
    graph.append(product)
    graph.outputs[0] = product.outputs[0]
    graph.remove(graph[0])
    for part in [*parts, joined(graph, parts)]:
        graph.initializers.pop(str(part.name))  # as RemoveUnusedNodesPass would
    save(ir.Model(graph, ir_version=10), "graph", WeightStore(directory=tmp_path))
    weight, given = np.concatenate([values(0), values(1), values(2)]), values(9)
    np.testing.assert_allclose(run(tmp_path / "graph.onnx", given), given @ weight.T, atol=1e-4)
    assert maker.made == ["a", "b", "c"]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = save(summing(Maker(), a=1, b=2), "graph", WeightStore(directory=tmp_path))
    onnx.checker.check_model(path, full_check=True)
    loaded = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    np.testing.assert_array_equal(loaded["a"], values(1))
    np.testing.assert_array_equal(loaded["b"], values(2))
    np.testing.assert_array_equal(run(path, values(3)), values(3) + values(1) + values(2))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16])
def test_types_keep_their_bytes(tmp_path: Path, dtype: type) -> None:
    data = np.arange(3000).astype(dtype)
    graph = graph_of()
    weight = lazy(graph, "w", lambda: data, ir.DataType.from_numpy(data.dtype), data.shape)
    graph.append(ir.node("Identity", [weight]))
    path = save(ir.Model(graph, ir_version=10), "graph", WeightStore(directory=tmp_path))
    (tensor,) = onnx.load(path).graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), data, strict=True)


def test_weights_start_on_pages(tmp_path: Path) -> None:
    found = places(save(summing(Maker(), a=1, b=2, c=3), "g", WeightStore(directory=tmp_path)))
    assert [offset for _, offset, _ in found.values()] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert {length for _, _, length in found.values()} == {4 * ROWS * COLUMNS}
    assert (tmp_path / "g.data").stat().st_size == 2 * ALIGNMENT + 4 * ROWS * COLUMNS


def test_small_tensors_stay_inside_the_graph(tmp_path: Path) -> None:
    graph = graph_of()
    small = np.ones((ROWS, 1), np.float32)
    assert small.nbytes < THRESHOLD_BYTES
    model = append_sum(graph, [constant(graph, "small", small)])
    path = save(model, "graph", WeightStore(directory=tmp_path))
    assert places(path) == {}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph.onnx"]
    np.testing.assert_array_equal(run(path, values(0)), values(0) + small)


def test_equal_bytes_within_a_graph_are_stored_once(tmp_path: Path) -> None:
    """The alias comes first in the graph, and still points at the other's place."""
    maker = Maker()
    model = summing(maker, table=1, codes=1, other=2)
    model.graph.initializers["table"].metadata_props["outrider.same_bytes_as"] = "codes"
    path = save(model, "graph", WeightStore(directory=tmp_path))
    found = places(path)
    assert found["table"] == found["codes"] != found["other"]
    assert maker.made == ["codes", "other"]
    np.testing.assert_array_equal(
        run(path, values(0)), values(0) + values(1) + values(1) + values(2)
    )


def test_an_alias_of_nothing_is_written_itself(tmp_path: Path) -> None:
    """Its original was dropped from the graph as unused."""
    maker = Maker()
    model = summing(maker, table=1, other=2)
    model.graph.initializers["table"].metadata_props["outrider.same_bytes_as"] = "gone"
    path = save(model, "graph", WeightStore(directory=tmp_path))
    assert maker.made == ["other", "table"]
    np.testing.assert_array_equal(run(path, values(0)), values(0) + values(1) + values(2))


def test_graphs_of_one_bundle_share_what_has_one_key(tmp_path: Path) -> None:
    """The second graph's embedding lies in the first one's data; its own weights in its own."""
    maker, store = Maker(), WeightStore(directory=tmp_path)
    keys = {"embed": "embedding", "borrowed": "embedding"}
    target = save(summing(maker, embed=1, a=2), "target", store, share=keys.get)
    draft = save(summing(maker, borrowed=1, a=3), "draft", store, share=keys.get)
    assert maker.made == ["embed", "a", "a"]
    assert places(draft)["borrowed"] == places(target)["embed"]
    assert places(draft)["a"][0] == "draft.data"
    assert (tmp_path / "draft.data").stat().st_size == 4 * ROWS * COLUMNS
    np.testing.assert_array_equal(run(draft, values(0)), values(0) + values(1) + values(3))


def test_equal_names_in_two_graphs_are_two_weights(tmp_path: Path) -> None:
    maker, store = Maker(), WeightStore(directory=tmp_path)
    save(summing(maker, a=1), "target", store)
    path = save(summing(maker, a=2), "draft", store)
    np.testing.assert_array_equal(run(path, values(0)), values(0) + values(2))
