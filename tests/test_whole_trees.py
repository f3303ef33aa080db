"""Rounds with trees as one program, on ONNX Runtime's executor: as step by step, whatever was there
before, in tokens and in caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_build import K
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tree import trees

from export.build import BuildRequest, build
from export.tree_round_graphs import write_tree_round
from runtime import whole_tree
from runtime.bundle import Bundle
from runtime.captured_calls import MakeProgram, sequentially
from runtime.captured_programs import Program
from runtime.capturing import Capturing
from runtime.contract import CacheSpec, accept_graph, branch_graph, target_graph
from runtime.draft_model import DraftModel
from runtime.engine import load_rounds
from runtime.executor import EngineOptions, Executor, stacked_caches
from runtime.model_brancher import ModelBrancher
from runtime.outcome import Outcome
from runtime.round import Rounds
from runtime.sampling import SamplingParams
from runtime.steps import Steps
from runtime.tree import Tree
from runtime.tree_contract import caches_a_call, path_graph, pick_graph, place_graph
from runtime.tree_shape import StaticTree, parse_tree
from runtime.uniforms import uniform_table
from runtime.whole_rounds import WholeRounds
from runtime.whole_tree import WholeTreeEngines, WholeTreeProgram, WholeTrees

ONE = EngineOptions(threads=1, spin=False)
NODES, CONTEXT = 16, 96
NEAR = 1e-4  # f32 rows that were computed in other company; keys and values are about 1
SAMPLED = SamplingParams(temperature=1.3)
PARAMS = [
    SamplingParams(),
    SAMPLED,
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=0.9, top_p=0.6),
    SamplingParams(temperature=1.3, min_p=0.3),
]
SHAPE = Tree.of_widths([3, 2, 1])


@pytest.fixture(
    scope="module", params=["itself", pytest.param("distilled", marks=pytest.mark.slow)]
)
def bundle(
    request: pytest.FixtureRequest,
    own_trees_bundle: Path,
    build_root: Path,
    tiny_target: Path,
    tiny_draft: Path,
) -> Bundle:
    """What drafts: the target; a draft with fewer tokens and a cache of half the context."""
    if request.param == "itself":
        return Bundle.load(own_trees_bundle)
    asked = BuildRequest(
        target=str(tiny_target),
        draft=str(tiny_draft),
        out=build_root / "whole-trees-distilled",
        precision="fp32",
        max_context=CONTEXT,
        max_draft_tokens=K,
        max_tree_nodes=NODES,
    )
    return Bundle.load(build(asked))


class Seen:
    """Binds as an executor does, and keeps what its calls write but for the caches."""

    def __init__(self, executor: Executor, written: list[np.ndarray]) -> None:
        self._executor, self._written = executor, written

    def bind(self, inputs: Any, outputs: Any) -> Any:
        self._written += [a for n, a in outputs.items() if not n.startswith("present")]
        return self._executor.bind(inputs, outputs)


class Counted:
    """A program whose launches are counted."""

    def __init__(self, both: Both, program: Program) -> None:
        self._both, self._program = both, program

    def run(self) -> float:
        self._both.runs += 1
        return self._program.run()


class Both:
    """One sequence over one set of caches, round by round step by step and by programs."""

    def __init__(self, bundle: Bundle, make: MakeProgram = sequentially) -> None:
        self.manifest, self.path = bundle.manifest, bundle.path
        steps = load_rounds(bundle.path, bundle.manifest, ONE)
        assert isinstance(steps.drafter, DraftModel)
        self.model, self.written, self.runs = steps.drafter, list[np.ndarray](), 0
        self.whole = WholeTrees(
            self._engines(steps),
            vocab=self.manifest.target.vocab_size,
            draft_vocab=self.manifest.draft_vocab_size,
            capturing=Capturing.by_calls((CONTEXT,), lambda *what: Counted(self, make(*what))),
        )
        made_of = Steps(
            buffers=steps.buffers,
            target=steps.target,
            drafter=steps.drafter,
            accept=steps.accept,
            brancher=steps.brancher,
        )
        self.rounds = WholeRounds(
            made_of, captured=None, trees=None, whole_trees=self.whole, max_context=CONTEXT
        )

    def _engines(self, steps: Rounds) -> WholeTreeEngines:
        cache, draft = self.manifest.target.cache, self.manifest.draft_model
        assert draft is not None
        made = self.path.parent / f"{self.path.name}-graphs"
        made.mkdir(exist_ok=True)
        write_tree_round(cache, made)
        specs = {
            "target": target_graph(cache),
            "branch": branch_graph(draft.cache),
            "accept": accept_graph(),
            "pick": pick_graph(),
            "path": path_graph(cache),
            "place": place_graph(cache),
        }
        found = {}
        for name, spec in specs.items():
            place = made if name in ("pick", "path", "place") else self.path / "onnx"
            found[name] = Seen(Executor.load(place / f"{name}.onnx", spec, ONE), self.written)
        return WholeTreeEngines(
            **found,
            target_caches=steps.target.caches,
            draft_caches=self.model.caches,
            joined=steps.target.joined_caches(caches_a_call(cache)),
        )

    def begin(self, prompt: list[int], params: SamplingParams, seed: int) -> list[int]:
        self.uniforms = uniform_table(seed, CONTEXT + 1, 8)
        self.rounds.forget()
        self.rounds.begin(params, prompt)
        return [*prompt, *self.rounds.prefill(list(prompt), self.uniforms).tokens]

    def launched(self, tokens: list[int], tree: Tree, nodes: int = NODES) -> Outcome:
        return self.rounds.run_tree(tokens, StaticTree(tree=tree), nodes, self.uniforms)

    def stepped(self, tokens: list[int], tree: Tree, nodes: int = NODES) -> Outcome:
        return Rounds.run_tree(self.rounds, tokens, StaticTree(tree=tree), nodes, self.uniforms)

    def poison(self) -> None:
        """All that earlier launches left: NaN, lengths, tokens and rows of -1."""
        for program in self.programs():
            program.arena.memory[:] = 0xFF
        for array in self.written:
            array[...] = -1 if array.dtype.kind == "i" else np.nan

    def programs(self) -> list[WholeTreeProgram]:
        return list(self.whole.programs._programs.values())

    def caches(self, committed: int) -> list[np.ndarray]:
        """Copies of the valid rows: the target's, and the draft's for its window."""
        target = self.rounds.target._rows[..., : self.rounds.target.length, :]
        rows = min(committed - 1 - self.model.window.base, self.model.window.rows)
        return [target.copy(), *(a[..., :rows, :].copy() for a in self.model.caches.values())]

    def clean(self, tokens: list[int], base: int) -> list[np.ndarray]:
        """The same of a run that read the tokens and nothing else; the draft from `base` on."""
        self.rounds.forget()
        self.rounds.prefill(list(tokens), self.uniforms)
        brancher, window = self.rounds.brancher, self.model.window
        assert isinstance(brancher, ModelBrancher)
        window.base, window.rows = base, 0
        brancher._calls.read(tokens[base:-1])
        return self.caches(len(tokens))


@pytest.fixture(scope="module")
def many_trees() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(whole_tree, "MOST_TREES", 1 << 20)
        yield


@pytest.fixture(scope="module")
def both(bundle: Bundle, many_trees: None) -> Both:
    return Both(bundle)


@pytest.fixture(scope="module")
def other(bundle: Bundle) -> Both:
    return Both(bundle)


def _plain(tree: Tree) -> bool:
    return tree.size > 0 and tree.width <= 8


PROMPTS = st.lists(st.integers(5, 40), min_size=2, max_size=20)
MANY = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(data=st.data(), params=st.sampled_from(PARAMS), seed=st.integers(0, 2**31))
@MANY
def test_a_program_follows_its_inputs(
    both: Both, other: Both, data: st.DataObject, params: SamplingParams, seed: int
) -> None:
    """Any tree, text and sampling: the tokens and the caches of the steps, and of a clean run.

    Every byte that earlier launches left is overwritten first, so that what isn't written anew
    can't come out right. A draw falls another way where f32 rounds otherwise, in about one decision
    of 1e5.
    """
    tokens = both.begin(data.draw(PROMPTS), params, seed)
    other.begin(tokens[:-1], params, seed)
    for _ in range(3):
        tree = data.draw(trees(most=NODES).filter(_plain))
        both.poison()
        runs = both.runs
        launched = both.launched(tokens, tree)
        assert both.runs - runs == (tree.depth < len(tokens))
        stepped = other.stepped(tokens, tree)
        assert replace(launched, **_TIMES) == replace(stepped, **_TIMES)
        start = len(tokens)
        tokens = [*tokens, *launched.tokens]
        del tokens[start + data.draw(st.integers(1, len(tokens) - start)) :]
        for one in (both, other):
            one.rounds.rollback(len(tokens))
        assert both.model.length == other.model.length
        ours, base = both.caches(len(tokens)), both.model.window.base
        _near(ours, other.caches(len(tokens)))
        _near(ours, other.clean(tokens, base))
        assert other.rounds.target.length == len(tokens) == both.rounds.target.length + 1
        other.rounds.rollback(len(tokens))


_TIMES = {"draft_s": 0.0, "verify_s": 0.0, "accept_s": 0.0, "compact_s": 0.0}


def _near(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        rows = min(mine.shape[-2], its.shape[-2])  # a clean run may have read one row more
        np.testing.assert_allclose(mine[..., :rows, :], its[..., :rows, :], atol=NEAR)


def _worst(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(
        float(np.abs(mine[..., : its.shape[-2], :] - its[..., : mine.shape[-2], :]).max())
        for mine, its in pairs
        if min(mine.shape[-2], its.shape[-2])
    )


HOST = ["target_lengths", "draft_lengths", "read", "accept_uniforms", "draw_uniforms"]
HOST += ["temperature", "top_k", "top_p", "min_p", "block"]


@pytest.mark.parametrize("field", HOST)
def test_a_program_that_kept_an_input_is_found(
    bundle: Bundle, other: Both, field: str, many_trees: None
) -> None:
    """The comparison above fails for a capture that baked a host value in."""
    kept: list[np.ndarray] = []

    def make(calls, _context, up, _down):  # type: ignore[no-untyped-def]
        class Stale:
            def run(self) -> float:
                (program,) = both.programs()
                value = program.arena[field]
                assert up.ctypes.data <= value.ctypes.data < up.ctypes.data + up.nbytes
                if not kept:
                    kept.append(value.copy())
                value[...] = kept[0]
                return sum(call.run() for call in calls)

        return Stale()

    both, rng, differs = Both(bundle, make), np.random.default_rng(0), False
    for i in range(24):
        params, prompt = PARAMS[i % len(PARAMS)], rng.integers(5, 40, 4 + i % 7).tolist()
        tokens = both.begin(prompt, params, i)
        other.begin(prompt, params, i)
        launched, stepped = both.launched(tokens, SHAPE), other.stepped(tokens, SHAPE)
        rows = len(tokens) - 1, len(tokens) + 1
        ours, theirs = both.caches(rows[1]), other.caches(rows[1])
        differs = differs or launched.tokens != stepped.tokens or _worst(ours, theirs) > NEAR
    assert differs, f"{field} was kept from the first launch and nobody noticed"


def test_every_host_field_is_tried(both: Both) -> None:
    tokens = both.begin([5, 6, 7, 8], SAMPLED, 0)
    both.launched(tokens, SHAPE)
    program = both.programs()[-1]
    up = program.arena.up.nbytes
    start = program.arena.memory.ctypes.data
    fields = program.arena.fields
    assert {n for n, a in fields.items() if a.ctypes.data - start < up} == set(HOST)


def test_rows_that_stay_where_the_tree_put_them_are_seen(
    bundle: Bundle, other: Both, many_trees: None
) -> None:
    """Without the last call of the program, which places the accepted path."""

    def make(calls, _context, _up, _down):  # type: ignore[no-untyped-def]
        return sequentially(calls[:-1], 0, _up, _down)

    both, worst, params = Both(bundle, make), 0.0, PARAMS[2]
    for seed in range(24):
        prompt = [5 + (seed + i) % 9 for i in range(12)]
        tokens = both.begin(prompt, params, seed)
        other.begin(prompt, params, seed)
        for _ in range(3):
            found = both.launched(tokens, SHAPE)
            other.stepped(tokens, SHAPE)
            tokens += found.tokens
            for one in (both, other):
                one.rounds.rollback(len(tokens))
            worst = max(worst, _worst(both.caches(len(tokens)), other.caches(len(tokens))))
            if worst > 1000 * NEAR:
                return
    pytest.fail(f"the caches differ by {worst} at most")


def test_whole_rounds_take_turns_with_all_others(both: Both) -> None:
    """Chains, dynamic trees, plain steps and trees that are too large for what is left: greedy text
    is the target's own to the last row of the context."""
    tokens = both.begin([5 + i % 9 for i in range(10)], SamplingParams(), 1)
    plain, uniforms = list(tokens), both.uniforms
    while len(plain) < CONTEXT - 1:
        plain += both.rounds.run(plain, 0, uniforms).tokens
    tokens = both.begin(plain[:10], SamplingParams(), 1)
    runs, before, fitting = both.runs, len(both.programs()), 0
    dynamic, turn = parse_tree("dynamic:8:3:3"), 0
    while len(tokens) < CONTEXT - 1:
        left, turn = CONTEXT - len(tokens) - 1, turn + 1
        if turn % 4 == 1:
            tokens += both.rounds.run(tokens, min(2, left), uniforms).tokens
        elif turn % 4 == 2:
            tokens += both.rounds.run_tree(tokens, dynamic, min(8, left), uniforms).tokens
        elif turn % 8 == 3:
            tokens += both.rounds.run(tokens, 0, uniforms).tokens
        else:
            fitting += SHAPE.size <= left
            tokens += both.launched(tokens, SHAPE, min(SHAPE.size, left)).tokens
        both.rounds.rollback(len(tokens))
        assert tokens[: len(plain)] == plain[: len(tokens)], turn
    assert both.runs - runs == fitting > 2
    assert len(both.programs()) <= before + 1


def test_where_a_round_takes_the_steps(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the context's end, with adjusted logits, behind a text that is too short, and for trees
    beyond those that programs are kept for."""
    tokens = both.begin([5, 6, 7, 8, 9], SamplingParams(), 1)
    runs = both.runs
    both.launched(tokens, SHAPE)
    assert both.runs == runs + 1
    both.rounds.rollback(len(tokens))
    both.launched(tokens, SHAPE, SHAPE.size - 1)
    both.launched(tokens, Tree(()), 4)
    tokens = both.begin([5, 6], SamplingParams(), 1)
    both.launched(tokens, Tree.chain(4))
    tokens = both.begin([5, 6, 7, 8, 9], SamplingParams(logit_bias={7: 1.0}), 1)
    both.launched(tokens, SHAPE)
    tokens = both.begin([5, 6, 7, 8, 9], SamplingParams(banned_tokens=(7,)), 1)
    both.launched(tokens, SHAPE)
    monkeypatch.setattr(whole_tree, "MOST_TREES", 0)
    tokens = both.begin([5, 6, 7, 8, 9], SamplingParams(), 1)
    both.launched(tokens, Tree.of_widths([2, 3]))
    assert both.runs == runs + 1
    both.launched(tokens, SHAPE)  # known already
    assert both.runs == runs + 2


def test_the_rows_of_a_path_move_in_all_caches(tmp_path: Path) -> None:
    """In parts, as where one tensor would be too large; all else stays, bit for bit."""
    cache = CacheSpec(layers=3, kv_heads=2, head_dim=4, max_context=20)
    tree, rng = (
        Tree.of_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]]),
        np.random.default_rng(0),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("runtime.tree_contract._MOST_ELEMENTS", 2 * 2 * 4 * 20)
        assert caches_a_call(cache) == 2
        write_tree_round(cache, tmp_path)
        specs = {"path": path_graph(cache), "place": place_graph(cache)}
    found = {n: Executor.load(tmp_path / f"{n}.onnx", spec, ONE) for n, spec in specs.items()}
    whole, _ = stacked_caches(cache.past(), cache.shape(1))
    paths = whole_tree.Growth(tree).paths
    for row in range(tree.size + 1):
        whole[...] = rng.normal(size=whole.shape)
        expected, length = whole.copy(), 5 + row
        for i, source in enumerate(tree.path(row)):
            expected[..., length + 1 + i, :] = whole[..., length + source, :]
        lengths, last = np.array([length], np.int32), np.array([row])
        for caches in whole.reshape(3, 1, 4, 20, 4):
            moved = np.zeros((1, 4, tree.depth, 4), np.float32)
            there = {"past_key_values": caches, "past_lengths": lengths}
            told = {**there, "last_row": last, "paths": paths}
            found["path"].bind(told, {"path_rows": moved}).run()
            found["place"].bind({**there, "path_rows": moved}, {"present": caches}).run()
        assert np.array_equal(whole, expected)


def test_a_part_is_as_large_as_a_tensor_may_be() -> None:
    small = CacheSpec(layers=30, kv_heads=3, head_dim=64, max_context=2048)
    assert caches_a_call(small) == 60
    large = CacheSpec(layers=32, kv_heads=8, head_dim=128, max_context=1 << 17)
    assert caches_a_call(large) == 8
    assert 8 * large.kv_heads * large.head_dim * large.max_context < 2**31
