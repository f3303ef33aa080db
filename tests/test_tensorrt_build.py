"""Engines of tiny graphs, really built by TensorRT-RTX on a machine without a GPU.

An engine is built for compute capabilities 8.0, 8.9 and 12.0 and never run here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from family_configs import FAMILIES
from helpers_family import bind, portable_graph, random_model, written
from helpers_lowering import graph_of, random

from calibration.input_scales import LayerInput
from engines.external_data import WeightStore, save
from engines.qdq import EightBits, Qdq, QdqLinearPass
from engines.tensorrt.build import BuildOptions, Plan, TimingCache, build_plan
from engines.tensorrt.lowering import lower
from engines.tensorrt.package import Library, load
from engines.tensorrt.ranges import (
    Profile,
    Range,
    draft_profiles,
    target_profiles,
    tree_round_profiles,
)
from engines.tensorrt.rules import check_size, source_bytes
from engines.tensorrt.strong_types import NARROW
from engines.tensorrt.weight_only import WeightFormat
from export.tree_round_graphs import write_tree_round
from runtime.contract import CacheSpec
from runtime.engine_contract import bucket_for, context_buckets
from runtime.errors import BuildError
from runtime.manifest import Limits
from runtime.tree_contract import TREE_GRAPHS

pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)

CONTEXT = 48
LIMITS = Limits(max_batch=2, max_context=CONTEXT, max_draft_tokens=4)
TARGETS = (80, 89, 120)
ANY = Profile(name="any", ranges={"s": Range(least=1, usual=4, most=8)})


@pytest.fixture(scope="module")
def library() -> Library:
    return load("tensorrt-rtx")


@pytest.fixture(scope="module")
def decoder() -> ir.Model:
    """A layer of Llama that verifies trees, its weights bound."""
    config = FAMILIES[0].config(num_hidden_layers=1)
    graph = portable_graph(config, CONTEXT, trees=True)
    bind(graph, random_model(config))
    return graph


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_decoder_builds_for_every_target(
    library: Library, decoder: ir.Model, precision: str, tmp_path: Path
) -> None:
    path = written(lower(decoder.clone(), NARROW[precision]), "target", tmp_path)
    timing = TimingCache()
    options = BuildOptions(compute_capabilities=TARGETS)
    plan = build_plan(library, path, target_profiles(LIMITS), options, timing)
    assert len(plan.data) > plan.weight_bytes
    assert all("slots" in line for line in plan.warnings)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("nodes", [1, 24])
def test_what_launches_a_tree_builds_for_every_target(
    library: Library, dtype: str, nodes: int, tmp_path: Path
) -> None:
    """Picking tokens, reading a path's rows and placing them, over all caches joined."""
    cache = CacheSpec(layers=2, kv_heads=3, head_dim=16, max_context=CONTEXT, dtype=dtype)
    profiles = tree_round_profiles(replace(LIMITS, max_tree_nodes=nodes))
    graphs = write_tree_round(cache, tmp_path)
    assert tuple(graphs) == TREE_GRAPHS
    for path in graphs.values():
        plan = build_plan(library, path, profiles, BuildOptions(compute_capabilities=TARGETS))
        assert not plan.warnings


def _build(library: Library, text: str, tmp_path: Path, profile: Profile = ANY) -> Plan:
    path = save(graph_of(text, {}), "graph", WeightStore(directory=tmp_path))
    return build_plan(library, path, [profile], BuildOptions(compute_capabilities=(89,)))


def test_a_dropped_input_fails_the_build(library: Library, tmp_path: Path) -> None:
    """Attention-24's own lengths: the parser drops them, and the engine sees every row."""
    text = """g (float16[1,2,s,16] q, float16[1,2,8,16] k, float16[1,2,8,16] v, int64[1] n)
        => (float16[1,2,s,16] y) { y = Attention(q, k, v, , , , n) }"""
    with pytest.raises(BuildError, match=r"graph\.onnx: the builder warned.*[Uu]nused.*Expected"):
        _build(library, text, tmp_path)


def test_a_wider_type_fails_the_build(library: Library, tmp_path: Path) -> None:
    text = """g (float16[1,s,8] x) => (float[1,s,8] y)
        { wide = Cast<to=1>(x)  y = Exp(wide) }"""
    with pytest.raises(BuildError, match=r"received 1 casts from a narrow float.*Expected 0"):
        _build(library, text, tmp_path)


def test_an_operator_that_cannot_be_built_is_an_error(library: Library, tmp_path: Path) -> None:
    """TopK beyond 3,840 parses and then has no kernel."""
    text = """g (float[1,s,5000] x) => (float[1,s,4000] y, int64[1,s,4000] i)
        { k = Constant<value_ints=[4000]>()  y, i = TopK(x, k) }"""
    with pytest.raises(BuildError, match=r"graph\.onnx: tensorrt-rtx .*(refused|can't parse)"):
        _build(library, text, tmp_path)


def test_an_axis_without_a_range_is_an_error(library: Library, tmp_path: Path) -> None:
    text = "g (float[1,other,8] x) => (float[1,other,8] y) { y = Exp(x) }"
    with pytest.raises(BuildError, match=r"x: received an axis 'other'. Expected one of s"):
        _build(library, text, tmp_path)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [((70,), r"received 70. Expected some of 75, 80,"), ((90,), r"received 90. Expected some of")],
)
def test_an_unknown_target_is_refused(
    library: Library, decoder: ir.Model, chosen: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    path = written(lower(decoder.clone(), NARROW["fp16"]), "target", tmp_path)
    with pytest.raises(BuildError, match=r"--compute-capability: " + message):
        build_plan(library, path, [], BuildOptions(compute_capabilities=chosen))


WIDTH = 512
FORMATS = {
    "int8": (None, TARGETS, 1.0),
    "int4": (128, TARGETS, 0.5),
    "fp8": (None, (89, 120), 1.0),
    "fp4": (16, (120,), 0.5),
}


def _linear(kind: str, tmp_path: Path) -> Path:
    model = graph_of(
        f"""g (float[1,s,{WIDTH}] x, float[{WIDTH},{WIDTH}] w) => (float[1,s,{WIDTH}] y)
        {{ t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t) }}""",
        {"w": random(WIDTH, WIDTH)},
    )
    block = FORMATS[kind][0]
    fmt = WeightFormat(kind=kind, block=block, scales=np.dtype(np.float16))
    tmp_path.mkdir(exist_ok=True)
    return written(lower(model, NARROW["fp16"], fmt), kind, tmp_path)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_stay_compressed_in_the_plan(library: Library, kind: str, tmp_path: Path) -> None:
    _, targets, bytes_a_weight = FORMATS[kind]
    for target in targets:
        options = BuildOptions(compute_capabilities=(target,))
        plan = build_plan(library, _linear(kind, tmp_path / str(target)), [ANY], options)
        weights = WIDTH * WIDTH * bytes_a_weight
        assert weights < plan.weight_bytes < 1.3 * weights
        assert len(plan.data) < 1.3 * weights + 500_000, "unpacked it would be twice as much"


@pytest.mark.parametrize("kind", list(EightBits), ids=lambda kind: kind.value)
def test_products_of_8_bits_keep_their_weights_so(
    library: Library, kind: EightBits, tmp_path: Path
) -> None:
    """A quarter of what they would be in f32, in each type of the graph that carries them."""
    model = graph_of(
        f"""g (float[1,s,{WIDTH}] x, float[{WIDTH},{WIDTH}] w) => (float[1,s,{WIDTH}] y)
        {{ t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t) }}""",
        {"w": random(WIDTH, WIDTH)},
    )
    one = LayerInput(scale=4 / kind.top, smoothing=np.full(WIDTH, 1.5, np.float32))
    for dtype in NARROW.values():
        qdq = Qdq(kind=kind, scale_of=lambda _: one, scales=dtype.numpy())
        folder = tmp_path / dtype.name
        folder.mkdir()
        path = written(lower(model.clone(), dtype, None, QdqLinearPass(qdq)), "linear", folder)
        options = BuildOptions(compute_capabilities=(89,))
        plan = build_plan(library, path, [ANY], options)
        weights = WIDTH * WIDTH
        assert weights < plan.weight_bytes < 1.1 * weights
        assert len(plan.data) < 1.3 * weights + 500_000, "unpacked it would be twice as much"


def test_profiles_share_the_weights(library: Library, tmp_path: Path) -> None:
    """A profile with one row beside others would keep them twice."""
    model = graph_of(
        """g (float[batch,query_len,1024] x, float[1024,1024] w) => (float[batch,query_len,1024] y)
        { t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t) }""",
        {"w": random(1024, 1024)},
    )
    path = written(lower(model, NARROW["fp16"]), "linear", tmp_path)
    options = BuildOptions(compute_capabilities=(89,))
    for profiles in (target_profiles(LIMITS), draft_profiles(LIMITS, CONTEXT)):
        plan = build_plan(library, path, profiles, options)
        assert len(plan.data) < 1.3 * plan.weight_bytes


@pytest.mark.parametrize(("kind", "least"), [("fp8", 89), ("fp4", 100)])
def test_a_type_that_a_target_lacks_is_refused(
    library: Library, kind: str, least: int, tmp_path: Path
) -> None:
    options = BuildOptions(compute_capabilities=(80,))
    with pytest.raises(BuildError, match=rf"weights for compute capability 80. Expected {least}"):
        build_plan(library, _linear(kind, tmp_path), [ANY], options)


def test_a_plan_larger_than_its_weights_fails() -> None:
    weights = np.random.default_rng(0).integers(0, 256, 10 << 20).astype(np.uint8)
    check_size("target.onnx", weights, len(weights))
    with pytest.raises(BuildError, match=r"target\.onnx: received a plan that holds 20,9.*source"):
        check_size("target.onnx", np.concatenate([weights, weights]), len(weights))


def test_the_source_of_kernels_is_no_weight() -> None:
    weights = np.random.default_rng(0).integers(0, 256, 10 << 20).astype(np.uint8)
    source = np.frombuffer(b"__device__ half f(half x) {\n\treturn x;\n}\n" * (1 << 20), np.uint8)
    assert source_bytes(weights) == 0
    assert source_bytes(source) > 0.99 * len(source)
    check_size("target.onnx", np.concatenate([weights, source]), len(weights))
    with pytest.raises(BuildError, match="unpacked weights"):
        check_size("target.onnx", np.concatenate([weights, source, weights]), len(weights))


def test_a_missing_package_says_what_to_install() -> None:
    with pytest.raises(BuildError, match=r"no usable package.*pip install 'outrider\[tensorrt\]'"):
        load("tensorrt")


def test_buckets_and_profiles_cover_the_limits() -> None:
    assert context_buckets(2048) == (256, 512, 1024, 2048)
    assert context_buckets(1000) == (256, 512, 1000)
    assert context_buckets(48) == (48,)
    assert [bucket_for(n, 1000) for n in (1, 256, 257, 1000)] == [256, 256, 512, 1000]
    verify = target_profiles(LIMITS)[-1]
    assert verify.ranges["query_len"] == Range(least=1, usual=3, most=5)
    assert target_profiles(LIMITS)[0].ranges["query_len"].most == CONTEXT
    plain = Limits(max_batch=1, max_context=CONTEXT, max_draft_tokens=0)
    assert target_profiles(plain)[1].ranges["query_len"] == Range(least=1, usual=1, most=2)
    assert draft_profiles(LIMITS, 32)[1].ranges["query_len"].most == 2
