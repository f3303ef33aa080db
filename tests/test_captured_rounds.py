"""Rounds as one program, on ONNX Runtime's executor: what a GPU captures, without the GPU.

A program keeps addresses and shapes; each launch must follow from what is written before it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.arena import ALIGNMENT, Arena, Field, on_host
from runtime.bundle import Bundle
from runtime.captured_calls import MakeProgram, sequentially
from runtime.captured_programs import CapturedPrograms, RoundShape
from runtime.captured_round import (
    CapturedRounds,
    RoundEngines,
    RoundInputs,
    RoundProgram,
)
from runtime.capturing import Capturing
from runtime.contract import accept_graph, draft_graph, target_graph
from runtime.draft_model import DraftModel
from runtime.engine import load_rounds
from runtime.errors import EngineError
from runtime.executor import EngineOptions, Executor
from runtime.outcome import Outcome
from runtime.round import Rounds
from runtime.sampling import SamplingParams
from runtime.uniforms import uniform_table

ONE = EngineOptions(threads=1, spin=False)
PROMPT = [5, 9, 14, 3, 77, 21]
ROOM = 24  # tokens that a test commits at most


class Both:
    """The same sequence decoded step by step, and by programs over the same caches."""

    def __init__(self, bundle: Bundle, make: MakeProgram = sequentially) -> None:
        manifest = bundle.manifest
        assert manifest.draft_model is not None
        self.manifest = manifest
        self.steps: Rounds = load_rounds(bundle.path, manifest, ONE)
        drafter = self.steps.drafter
        assert isinstance(drafter, DraftModel)
        onnx = bundle.path / "onnx"
        cards = manifest.target, manifest.draft_model
        self.captured = CapturedRounds(
            RoundEngines(
                target=Executor.load(onnx / "target.onnx", target_graph(cards[0].cache), ONE),
                draft=Executor.load(onnx / "draft.onnx", draft_graph(cards[1].cache), ONE),
                accept=Executor.load(onnx / "accept.onnx", accept_graph(), ONE),
                target_caches=self.steps.target.caches,
                draft_caches=drafter.caches,
            ),
            vocab=manifest.target.vocab_size,
            draft_vocab=manifest.draft_vocab_size,
            capturing=Capturing.by_calls((manifest.limits.max_context,), make),
        )

    def begin(self, params: SamplingParams, seed: int) -> list[int]:
        """Prefill and one round step by step, after which the draft lacks two tokens at most."""
        self.params, self.uniforms = params, uniform_table(seed, 128)
        self.steps.begin(params, PROMPT)
        tokens = [*PROMPT, *self.steps.prefill(list(PROMPT), self.uniforms).tokens]
        return self.commit(tokens, self.steps.run(tokens, 2, self.uniforms))

    def commit(self, tokens: list[int], outcome: Outcome) -> list[int]:
        tokens = [*tokens, *outcome.tokens]
        self.steps.rollback(len(tokens))
        return tokens

    def inputs(self, tokens: list[int]) -> RoundInputs:
        return RoundInputs(
            tokens=tokens,
            draft_rows=len(tokens) - 2,
            uniforms=self.uniforms,
            params=self.params,
        )

    def program(self, k: int) -> RoundProgram | None:
        """As a launch before left it."""
        shape = RoundShape(batch=1, drafts=k, context=self.manifest.limits.max_context)
        programs = self.captured.programs
        return programs.program(batch=1, drafts=k, rows=1) if shape in programs.captured else None


@pytest.fixture(scope="module")
def bundle(fp32_bundle: Path) -> Bundle:
    return Bundle.load(fp32_bundle)


@pytest.fixture(scope="module")
def both(bundle: Bundle) -> Both:
    return Both(bundle)


SAMPLED = SamplingParams(temperature=1.3, top_k=40)
PARAMS = st.sampled_from(
    [SamplingParams(), SAMPLED, SamplingParams(temperature=0.9, top_p=0.8, min_p=0.02)]
)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), params=PARAMS, drafts=st.lists(st.integers(1, 4), min_size=3))
def test_a_program_follows_its_inputs(
    both: Both, seed: int, params: SamplingParams, drafts: list[int]
) -> None:
    """Whatever k, length and sampling the launch before had: tokens as step by step.

    Every byte that an earlier launch left is overwritten first, so that what isn't written anew
    can't come out right.
    """
    tokens = both.begin(params, seed)
    for k in drafts:
        if len(tokens) > len(PROMPT) + ROOM:
            break
        _poison(both.program(k))
        launched = both.captured.run(both.inputs(tokens), k)
        stepped = both.steps.run(tokens, k, both.uniforms)
        assert (launched.tokens, launched.num_accepted) == (stepped.tokens, stepped.num_accepted)
        tokens = both.commit(tokens, stepped)


def _poison(program: RoundProgram | None) -> None:
    if program is None:
        return
    program.arena.memory[:] = 0xFF  # NaN, and lengths and tokens of -1
    program.decision.logits[:] = np.nan
    program.decision.q[:] = np.nan


@pytest.mark.parametrize("field", ["target_lengths", "draft_lengths", "block", "draw_uniforms"])
def test_a_program_that_kept_an_input_is_found(bundle: Bundle, field: str) -> None:
    """The comparison above fails for a capture that baked a host value in."""

    class Stale:
        def __init__(self, calls: list[object], start: int, kept: np.ndarray) -> None:
            self.calls, self.start, self.kept = calls, start, kept

        def run(self) -> float:
            program = both.program(3)
            assert program is not None
            raw = program.arena.memory
            raw[self.start : self.start + len(self.kept)] = self.kept
            return sum(call.run() for call in self.calls)  # type: ignore[attr-defined]

    def make(calls, _context, up, _down):  # type: ignore[no-untyped-def]
        stale = Stale(calls, 0, np.zeros(0, np.uint8))
        made.append((stale, up))
        return stale

    made: list[tuple[Stale, np.ndarray]] = []
    both = Both(bundle, make)
    tokens = both.begin(SAMPLED, 3)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Stale, "run", lambda self: sum(c.run() for c in self.calls))
        both.captured.run(both.inputs(tokens), 3)
    program, (stale, up) = both.program(3), made[0]
    assert program is not None
    value = program.arena[field]
    stale.start = value.ctypes.data - up.ctypes.data
    stale.kept = np.frombuffer(value.tobytes(), np.uint8).copy()
    differs = False
    for _ in range(6):
        tokens = both.commit(tokens, both.steps.run(tokens, 3, both.uniforms))
        launched = both.captured.run(both.inputs(tokens), 3)
        stepped = both.steps.run(tokens, 3, both.uniforms)
        differs = differs or launched.tokens != stepped.tokens
        both.steps.rollback(len(tokens))
    assert differs, f"{field} was kept from the first launch and nobody noticed"


# ---------------------------------------------------------------- which rounds are captured


class Recorded:
    """Takes memory as a capture would: in proportion to its context."""

    def __init__(self, free: int) -> None:
        self.free, self.seen = free, list[RoundShape]()

    def capture(self, shape: RoundShape) -> Recorded:
        self.free -= shape.context
        self.seen.append(shape)
        return self

    def run(self) -> float:
        return 0.0


def _programs(free: int, reserve: int = 0) -> tuple[CapturedPrograms[Recorded], Recorded]:
    recorded = Recorded(free)
    programs = CapturedPrograms(
        recorded.capture,
        (256, 512, 1024),
        free_bytes=lambda: recorded.free,
        reserve_bytes=reserve,
    )
    return programs, recorded


def test_the_largest_bucket_of_a_kind_is_captured_first_and_once() -> None:
    programs, recorded = _programs(10_000)
    for rows in (10, 300, 256, 257, 1024, 10):
        programs.program(batch=1, drafts=4, rows=rows)
    assert [shape.context for shape in recorded.seen] == [1024, 256, 512]
    programs.program(batch=1, drafts=2, rows=10)
    assert [(s.drafts, s.context) for s in recorded.seen[3:]] == [(2, 1024), (2, 256)]
    assert programs.captured == tuple(recorded.seen)


def test_where_memory_is_short_a_larger_bucket_serves() -> None:
    programs, recorded = _programs(2_000, reserve=500)
    programs.program(batch=1, drafts=4, rows=10)
    assert [shape.context for shape in recorded.seen] == [1024]
    recorded.free = 5_000
    programs.program(batch=1, drafts=4, rows=10)
    assert [shape.context for shape in recorded.seen] == [1024, 256]


@settings(max_examples=200)
@given(
    calls=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 1024)), max_size=30),
    free=st.integers(0, 20_000),
    reserve=st.integers(0, 3_000),
)
def test_a_call_is_served_by_a_bucket_that_holds_it(
    calls: list[tuple[int, int]], free: int, reserve: int
) -> None:
    """Never by a smaller one; and optional captures leave the reserve alone."""
    served: list[RoundShape] = []

    class Serving:
        def __init__(self, shape: RoundShape) -> None:
            self.shape = shape

        def run(self) -> float:
            served.append(self.shape)
            return 0.0

    left = [free]

    def capture(shape: RoundShape) -> Serving:
        if shape.context != 1024:
            assert left[0] - 1024 >= reserve
        left[0] -= shape.context
        return Serving(shape)

    programs = CapturedPrograms(
        capture, (256, 512, 1024), free_bytes=lambda: left[0], reserve_bytes=reserve
    )
    for drafts, rows in calls:
        programs.program(batch=1, drafts=drafts, rows=rows).run()
        assert served[-1].context >= rows
        assert served[-1].drafts == drafts
    assert len(set(programs.captured)) == len(programs.captured)


def test_more_rows_than_the_context_is_an_error() -> None:
    programs, recorded = _programs(10_000)
    with pytest.raises(EngineError, match=r"received 1025 cache rows. Expected at most 1024"):
        programs.program(batch=1, drafts=4, rows=1025)
    assert not recorded.seen


def test_an_arena_is_one_block_whose_parts_are_copied_whole() -> None:
    def field(name: str, *shape: int, dtype: object = np.int64) -> Field:
        return Field(name=name, shape=shape, dtype=dtype)

    arena = Arena(
        host=(field("a", 1, dtype=np.int32), field("b", 1, 0)),
        shared=(field("c", 1, 40),),
        round=(field("d", 2, dtype=np.float32),),
        allocate=on_host,
    )
    for name, value in arena.fields.items():
        value[...] = ord(name)
    for view in arena.fields.values():
        assert (view.ctypes.data - arena.memory.ctypes.data) % ALIGNMENT == 0
    start = arena.memory.ctypes.data
    assert arena.up.ctypes.data == start
    assert arena.up.nbytes == 3 * ALIGNMENT, "a, then c in two pieces; b is empty"
    assert arena.down.ctypes.data == arena["c"].ctypes.data
    assert arena.down.nbytes == 3 * ALIGNMENT
    assert arena["a"][0] == ord("a"), "no field lies on another"
    assert (arena["c"] == ord("c")).all()
