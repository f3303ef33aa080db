"""Heads lowered for TensorRT: each graph against its portable one on ONNX Runtime's CPU, engines
really built for three targets, and whole bundles of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from helpers_family import operators, written
from helpers_heads import CONTEXT, KINDS, LAYERS, save_head, save_target
from helpers_tensorrt import NUMPY, types_of
from tiny_checkpoints import VOCAB

from engines.tensorrt.build import BuildOptions, build_plan
from engines.tensorrt.lowering import exact_passes, lower_exactly
from engines.tensorrt.package import load
from engines.tensorrt.strong_types import StrongTypesPass, widening_casts
from engines.weights import constant
from export import eagle_engine, engine_graphs
from export.build import BuildRequest, build
from export.checkpoint import Checkpoint, open_checkpoint
from export.eagle_draft import EagleDraftPlan
from export.eagle_trace import trace_fuse
from export.engine_gates import states_gates
from export.engine_graphs import write_target_graph
from export.engine_head import EngineHead
from export.engine_heads import write_engine_head
from export.engine_precision import engine_precision
from export.gates import relative_error
from export.medusa_draft import MedusaDraftPlan
from export.portable import bind_weights, make_portable, simplify
from export.precision import precision
from runtime.bundle import Bundle
from runtime.errors import BuildError, GateFailed
from runtime.manifest import EagleDraft, EngineCard, Limits
from runtime.oracle import Oracle

rtx = pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx isn't installed: pip install tensorrt-rtx-cu13"
)

Array = np.ndarray
F16 = ir.DataType.FLOAT16
ROWS = 12
PARITY = 2e-5  # f32 sums in another order; a state of the row before gives 0.1 and more
ROUNDING = 2e-2  # of fp16
LIMITS = Limits(max_batch=1, max_context=CONTEXT, max_draft_tokens=3, max_tree_nodes=8)
TARGETS = (80, 89, 120)
Plan = EagleDraftPlan | MedusaDraftPlan


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(save_target(tmp_path_factory.mktemp("target"))))


@pytest.fixture(scope="module")
def plans(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    place = tmp_path_factory.mktemp("heads")
    opened = {kind: str(save_head(kind, place)) for kind in KINDS}
    given: dict[str, Any] = {"target_context": CONTEXT, "precision": precision("int8")}
    found: dict[str, Plan] = {
        kind: EagleDraftPlan.open(opened[kind], target, **given) for kind in KINDS[:2]
    }
    found["medusa"] = MedusaDraftPlan.open(opened["medusa"], target, max_draft_tokens=3, **given)
    return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph of a head, and the calls that it is held to, caches passed on."""

    kind: str
    graph: str
    portable: Callable[[Plan], ir.Model]
    calls: tuple[dict[str, Array], ...]


def _ids(rows: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(3, VOCAB, (1, rows))


def _floats(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _pairs(rows: int, past: int) -> dict[str, Array]:
    return {
        "input_ids": _ids(rows, past),
        "states": _floats(1, rows, 32, seed=past),
        "past_lengths": np.array([past], np.int32),
        "context_slots": np.zeros(past + rows, np.int32),
    }


def _tree(past: int) -> dict[str, Array]:
    """Rows 2 … of a tree of 6 whose first two stand before the call."""
    parents = [-1, 0, 1, 1, 2, 1]
    visible = np.eye(6, dtype=np.bool_)
    for column, parent in enumerate(parents):
        if parent >= 0:
            visible[column] |= visible[parent]
    return _pairs(4, past) | {
        "depths": (visible.sum(1)[None] - 1).astype(np.int64),
        "visible": visible[None, 2:],
        "num_logits": np.array(3, np.int64),
        "logit_slots": np.zeros(3, np.int32),
    }


def _chain(rows: int, past: int) -> dict[str, Array]:
    return _pairs(rows, past) | {
        "depths": np.arange(rows, dtype=np.int64)[None],
        "visible": np.tri(rows, dtype=np.bool_)[None],
        "num_logits": np.array(1, np.int64),
        "logit_slots": np.zeros(1, np.int32),
    }


def _head(plan: Plan, trees: bool = False) -> ir.Model:
    assert isinstance(plan, EagleDraftPlan)
    traced = eagle_engine.trace_head(plan.head, plan.context, trees=trees)
    return make_portable(traced) if trees else simplify(traced)


CASES = [
    *(
        Case(kind=kind, graph=graph, portable=portable, calls=calls)
        for kind in KINDS[:2]
        for graph, portable, calls in (
            ("draft", _head, (_pairs(5, 0), _pairs(1, 5), _pairs(3, 6))),
            ("branch", lambda plan: _head(plan, True), (_chain(7, 0), _tree(9))),
        )
    ),
    Case(
        kind="eagle3",
        graph="fuse",
        portable=lambda plan: simplify(trace_fuse(plan.head)),  # type: ignore[union-attr]
        calls=({"features": 3 * _floats(1, ROWS, 96, seed=1)},),
    ),
    Case(
        kind="medusa",
        graph="heads",
        portable=lambda plan: plan.portable(),  # type: ignore[union-attr]
        calls=({"features": _floats(1, 1, 32, seed=2)},),
    ),
]


def _run(path: Path, calls: tuple[dict[str, Array], ...]) -> list[Array]:
    """What each call gives, but for caches, which the next one reads."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names, found = [o.name for o in session.get_outputs()], []
    caches = {
        i.name: np.zeros([1, *i.shape[1:]], NUMPY[i.type])
        for i in session.get_inputs()
        if i.name.startswith("past_key_values.")
    }
    for call in calls:
        known = {**call, **caches}
        results = session.run(None, {i.name: known[i.name] for i in session.get_inputs()})
        for name, value in zip(names, results, strict=True):
            if name.startswith("present."):
                caches[name.replace("present", "past_key_values")] = value
            else:
                found.append(value)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.kind}-{c.graph}")
def test_a_lowered_graph_is_the_portable_one(
    kept_traces: None, plans: dict[str, Plan], case: Case, tmp_path: Path
) -> None:
    plan = plans[case.kind]
    portable = case.portable(plan)
    if isinstance(plan, EagleDraftPlan):
        bind_weights(portable, plan.head.load)
    lowered = portable.clone()
    expected = _run(written(portable, "portable", tmp_path), case.calls)
    for step in exact_passes():
        step(lowered)
    exact = _run(written(lowered.clone(), "exact", tmp_path), case.calls)
    for a, b in zip(exact, expected, strict=True):
        assert relative_error(a, b) < PARITY
    assert not operators(lowered)["ReduceMean"], "a norm is spelled out"

    assert StrongTypesPass(F16)(lowered).modified
    assert types_of(lowered, "MatMul", "TensorScatter", "Attention") == {F16}
    assert not widening_casts(lowered)
    typed = _run(written(lowered, "typed", tmp_path), case.calls)
    for a, b in zip(typed, expected, strict=True):
        assert a.dtype == b.dtype == np.float32, "the contract's types"
        assert relative_error(a, b) < ROUNDING


def _engine_head(plan: Plan, name: str, scratch: Path) -> EngineHead:
    return write_engine_head(plan, engine_precision(name), LIMITS, scratch, target_vocab=VOCAB)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        *((kind, "fp16") for kind in KINDS),
        ("eagle3", "int8"),
        *(pytest.param(kind, "int8", marks=pytest.mark.slow) for kind in KINDS[1:]),
    ],
)
def test_every_graph_of_a_head_builds_for_every_target(
    kept_traces: None, plans: dict[str, Plan], kind: str, weights: str, tmp_path: Path
) -> None:
    made = _engine_head(plans[kind], weights, tmp_path)
    names = {
        "eagle3": {"draft", "fuse", "branch"},
        "eagle1": {"draft", "branch"},
        "medusa": {"heads", "tail", "rank"},
    }
    assert {order.name for order in made.orders} == names[kind]
    library, options = load("tensorrt-rtx"), BuildOptions(compute_capabilities=TARGETS)
    for order in made.orders:
        plan = build_plan(library, order.path, order.profiles, options)
        assert all("slots" in line for line in plan.warnings)


def _states(width: int) -> Callable[[Any], Array]:
    return lambda tokens: _floats(len(tokens), width, seed=5)


TOKENS = [int(t) for t in _ids(24, 3)[0]]


FEW_BITS = [
    ("eagle3", "int8"),
    ("eagle3", "int4"),
    ("eagle3", "fp4"),
    ("eagle1", "fp8-weight"),
    ("medusa", "int8"),
    ("medusa", "fp4"),
]


@pytest.mark.parametrize(("kind", "weights"), FEW_BITS)
def test_the_gates_hold_for_weights_of_few_bits(
    kept_traces: None, plans: dict[str, Plan], kind: str, weights: str, tmp_path: Path
) -> None:
    """The same rounded weights in the eager head. Of fp4 ONNX Runtime's CPU has no kernels: the
    exact graph has the weights unpacked, and the typed one isn't run."""
    made = _engine_head(plans[kind], weights, tmp_path)
    width = 96 if kind == "eagle3" else 32
    gates = {gate.name: gate for gate in made.gates(TOKENS, _states(width))}
    assert set(gates) == {"draft parity", "draft engine", "branch"}
    assert gates["draft engine"].status == ("skipped" if weights == "fp4" else "passed")
    assert gates["draft parity"].status == gates["branch"].status == "passed"
    assert float(gates["draft parity"].figures["relative_error"]) < 1e-4
    card = made.written.card
    assert card.precision == weights
    law = made.law(TOKENS, _states(width))
    assert law is not None
    assert law.shape == (len(TOKENS) - 1, card.vocab_size)
    np.testing.assert_allclose(law.sum(-1), 1, atol=1e-4)


def test_blocks_that_no_layer_has_are_refused(
    kept_traces: None, plans: dict[str, Plan], tmp_path: Path
) -> None:
    """int4's are of 64 features; Medusa's layers have 32 here."""
    with pytest.raises(BuildError, match=r"int4.*no layer's input is a multiple of 64"):
        _engine_head(plans["medusa"], "int4", tmp_path)


def test_states_that_fp16_does_not_bear_are_found(
    kept_traces: None, target: Checkpoint, tmp_path: Path
) -> None:
    """EAGLE-1 without norms and with large weights: its states run over."""
    source = str(save_head("eagle1", tmp_path, scale=1.0))
    plan = EagleDraftPlan.open(source, target, target_context=CONTEXT, precision=precision("int8"))
    made = _engine_head(plan, "fp16", tmp_path)
    with pytest.raises(GateFailed, match=r"gate draft engine: .*--draft-precision bf16"):
        made.gates(TOKENS, _states(32))


def _late(model: ir.Model, name: str) -> None:
    """Plant a fault: this input or output comes one row late, the last one first."""
    graph = model.graph
    value = next(v for v in (*graph.inputs, *graph.outputs) if v.name == name)
    last, end, axis, zero = (constant(graph, f"late.{n}", np.array([n])) for n in (-1, 99, 1, 0))
    parts = [ir.node("Slice", [value, *span, axis]) for span in ((last, end), (zero, last))]
    whole = ir.node("Concat", [part.outputs[0] for part in parts], {"axis": 1})
    late = whole.outputs[0]
    late.type, late.shape = value.type, value.shape
    for part in parts:
        part.outputs[0].type = value.type
    if value.is_graph_output():
        graph.extend([*parts, whole])
        value.name, late.name = f"{name}.early", name
        graph.outputs[list(graph.outputs).index(value)] = late
        return
    value.replace_all_uses_with(late)
    for part in parts:
        part.replace_input_with(0, value)
    graph.insert_before(graph[0], [*parts, whole])


@pytest.fixture
def lowered_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From now on graphs are lowered with a tensor of this name one row late."""

    def plant(name: str) -> None:
        def lower_wrongly(model: ir.Model, *rest: Any) -> ir.Model:
            lowered = lower_exactly(model, *rest)
            if name in {v.name for v in (*model.graph.inputs, *model.graph.outputs)}:
                _late(lowered, name)
            return lowered

        monkeypatch.setattr(engine_graphs, "lower_exactly", lower_wrongly)

    return plant


@pytest.mark.parametrize(("kind", "name"), [("eagle3", "features"), ("eagle1", "states")])
def test_a_head_that_reads_states_one_row_late_fails_its_gate(
    kept_traces: None,
    plans: dict[str, Plan],
    lowered_late: Callable[[str], None],
    tmp_path: Path,
    kind: str,
    name: str,
) -> None:
    lowered_late(name)
    made = _engine_head(plans[kind], "fp16", tmp_path)
    with pytest.raises(GateFailed, match=r"gate draft parity: received a relative error"):
        made.gates(TOKENS, _states(96 if kind == "eagle3" else 32))


def test_a_target_that_gives_its_states_one_row_late_fails_its_gate(
    kept_traces: None, target: Checkpoint, lowered_late: Callable[[str], None], tmp_path: Path
) -> None:
    lowered_late("features")
    fp16 = engine_precision("fp16")
    graph = write_target_graph(target, fp16, CONTEXT, tmp_path, taps=(LAYERS,))
    with pytest.raises(GateFailed, match=r"gate features: state 4: received a relative error"):
        states_gates(target, graph, fp16, TOKENS, (LAYERS,))


@pytest.fixture(
    scope="module", params=["eagle3", "medusa", pytest.param("eagle1", marks=pytest.mark.slow)]
)
def bundle(
    request: pytest.FixtureRequest, kept_traces: None, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    place = tmp_path_factory.mktemp(f"{request.param}-engines")
    return Bundle.load(build(_request(place, request.param)))


def _request(place: Path, kind: str, **changes: Any) -> BuildRequest:
    asked = BuildRequest(
        target=str(save_target(place)),
        draft=str(save_head(kind, place)),
        out=place / "bundle",
        backend="tensorrt-rtx",
        precision="fp16",
        draft_precision="int8",
        compute_capabilities=(89,),
        max_context=CONTEXT,
        max_draft_tokens=3,
        max_tree_nodes=8,
    )
    return replace(asked, **changes)


def test_a_bundle_of_a_head_is_complete(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.engines == EngineCard(
        package="tensorrt-rtx",
        version=rtx.__version__,
        compute_capabilities=(89,),
        draft_backend="tensorrt-rtx",
    )
    draft = manifest.draft
    assert draft is not None
    assert draft.tree_graphs is not None
    names = {"target", "accept", *draft.graphs, *draft.tree_graphs}
    plans = {name for name in manifest.files if name.endswith((".plan", ".onnx", ".data"))}
    assert plans == {f"engines/{name}.plan" for name in names}
    assert (manifest.target.precision, draft.precision) == ("fp16", "int8")
    if isinstance(draft, EagleDraft):
        assert draft.card.cache.dtype == "float16"
    gates = {gate.name: gate.status for gate in manifest.gates}
    assert set(gates.values()) == {"passed"}
    assert {"target parity", "features", "draft parity", "draft engine", "branch"} <= set(gates)
    oracle = Oracle.load(bundle.path)
    assert oracle.draft_probs.shape[1] == draft.vocab_size
    assert len(oracle.draft_probs) > 0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("eagle3", {"draft_precision": "fp4"}, r"--draft-precision: received FLOAT4E2M1 weights"),
        ("medusa", {"draft_precision": "fp8"}, r"--draft-precision: received 'fp8', which calib"),
        ("eagle3", {"draft_precision": "int8-kv"}, r"--draft-precision: received 'int8-kv'"),
    ],
)
def test_what_a_head_cannot_be_is_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    asked = _request(tmp_path, kind, **options)
    with pytest.raises(BuildError, match=message):
        build(asked)
    assert not asked.out.exists()


def test_a_lookup_before_a_head_is_refused_with_the_way_out(tmp_path: Path) -> None:
    asked = _request(tmp_path, "eagle3", max_tree_nodes=0)
    with pytest.raises(BuildError, match=r"--draft: received .* add --draft-backend onnxruntime"):
        build(replace(asked, draft=f"ngram+{asked.draft}"))
