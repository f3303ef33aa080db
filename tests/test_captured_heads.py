"""Rounds of a head as one program, on ONNX Runtime's executor: as step by step.

EAGLE heads are tables that agree with their target as long as each token meets the right state and
the cache holds the right rows: a single wrong one shows in what is drafted. Medusa's are random.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers_eagle import write_eagle_bundle
from helpers_medusa import write_medusa_bundle
from helpers_runtime import STATES, target_table
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.bundle import Bundle
from runtime.captured_calls import MakeProgram, sequentially
from runtime.captured_programs import RoundShape
from runtime.captured_round import RoundProgram
from runtime.capturing import Capturing
from runtime.contract import (
    accept_graph,
    eagle_graph,
    fuse_graph,
    heads_graph,
    tail_graph,
    target_graph,
)
from runtime.eagle_drafter import EagleDrafter
from runtime.engine import load_rounds
from runtime.executor import EngineOptions, Executor
from runtime.features import FeatureStore
from runtime.manifest import Manifest
from runtime.medusa_drafter import MedusaDrafter
from runtime.outcome import Outcome
from runtime.round import Rounds
from runtime.sampling import SamplingParams
from runtime.steps import Steps
from runtime.uniforms import uniform_table
from runtime.whole_chain import WholeDrafter, captured_chains, prepared
from runtime.whole_rounds import WholeRounds

ONE = EngineOptions(threads=1, spin=False)
TOKENS, CONTEXT, K = 8, 40, 4  # the cache's window starts anew on the way
TABLE = target_table(TOKENS, sharpness=1.0)
PROMPT = [1, 2, 3, 1, 2, 3, 4, 1, 2]
SAMPLED = SamplingParams(temperature=1.3)
PARAMS = st.sampled_from([SamplingParams(), SAMPLED, SamplingParams(temperature=0.8, top_k=5)])
STALE = ("target_lengths", "draft_lengths", "block", "draw_uniforms", "read_features")
CACHED = ("draft_lengths",)  # what only a head with a cache reads


@pytest.fixture(scope="module", params=["EAGLE-3", "EAGLE-1", "Medusa"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp(f"captured-{request.param}") / "bundle"
    if request.param == "Medusa":
        tables = np.random.default_rng(4).standard_normal((STATES, K, TOKENS)).astype(np.float32)
        return write_medusa_bundle(where, TABLE, 2 * tables, context=CONTEXT, eos=())
    version = int(request.param[-1])
    return write_eagle_bundle(
        where, TABLE, TABLE, context=CONTEXT, turn=0.3, version=version, eos=()
    )


class Whole:
    """Rounds that are launched whole where they can be, and a look at their programs."""

    def __init__(self, path: Path, make: MakeProgram = sequentially) -> None:
        manifest = Bundle.load(path).manifest
        steps = load_rounds(path, manifest, ONE)
        drafter = steps.drafter
        assert isinstance(drafter, WholeDrafter)
        self.captured = captured_chains(
            _executors(path, manifest),
            steps.target,
            drafter,
            manifest,
            Capturing.by_calls((CONTEXT,), self._noting(make)),
        )
        self.launched = False
        made_of = Steps(
            buffers=steps.buffers, target=steps.target, drafter=drafter, accept=steps.accept
        )
        self.rounds = WholeRounds(made_of, captured=self.captured, trees=None, max_context=CONTEXT)

    def program(self, k: int) -> RoundProgram | None:
        """As a launch before left it."""
        shape, programs = RoundShape(batch=1, drafts=k, context=CONTEXT), self.captured.programs
        return programs.program(batch=1, drafts=k, rows=1) if shape in programs.captured else None

    def poison(self, k: int) -> None:
        """All that launches share with the host or pass on inside, but for the caches."""
        program = self.program(k)
        if program is not None:
            program.arena.memory[:] = 0xFF  # NaN, and lengths and tokens of -1
            inside = [getattr(program, name, ()) for name in ("_own", "_head_logits")]
            for array in (program.decision.logits, program.decision.q, *inside[0], *inside[1]):
                array[...] = np.nan

    def run(self, tokens: list[int], k: int, uniforms: np.ndarray) -> tuple[Outcome, list[int]]:
        """What was drafted, too, wherever it stands."""
        self.launched = False
        outcome = self.rounds.run(tokens, k, uniforms)
        program = self.program(k) if self.launched else None
        if program is not None:
            return outcome, program.arena["block"][0, program.lead :].tolist()
        return outcome, self.rounds.buffers.block[0, 2 : 2 + k].tolist()

    def _noting(self, make: MakeProgram) -> MakeProgram:
        def made(calls, context, up, down):  # type: ignore[no-untyped-def]
            program = make(calls, context, up, down)

            def run() -> float:
                self.launched = True
                return program.run()

            return SimpleNamespace(run=run)

        return made


def _executors(path: Path, manifest: Manifest) -> dict[str, Executor]:
    specs = {
        "target": target_graph(manifest.target.cache),
        "accept": accept_graph(),
        "fuse": fuse_graph(),
        "heads": heads_graph(),
        "tail": tail_graph(),
    }
    if manifest.draft_model is not None:
        specs["draft"] = eagle_graph(manifest.draft_model.cache)
    graphs = {name: path / "onnx" / f"{name}.onnx" for name in specs}
    return {n: Executor.load(g, specs[n], ONE) for n, g in graphs.items() if g.exists()}


@pytest.fixture(scope="module")
def both(path: Path) -> tuple[Rounds, Whole]:
    return load_rounds(path, Bundle.load(path).manifest, ONE), Whole(path)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    params=PARAMS,
    moves=st.lists(st.tuples(st.integers(0, K), st.integers(0, 2)), min_size=4, max_size=12),
)
def test_whole_rounds_are_the_steps(
    both: tuple[Rounds, Whole], seed: int, params: SamplingParams, moves: list[tuple[int, int]]
) -> None:
    """Whatever k the round before had, plain ones between, and with tokens taken back."""
    steps, whole = both
    uniforms = uniform_table(seed, CONTEXT + 1)
    found = []
    for rounds in (steps, whole.rounds):
        rounds.forget()
        rounds.begin(params, PROMPT)
        tokens = [*PROMPT, *rounds.prefill(list(PROMPT), uniforms).tokens]
        seen: list[object] = []
        for k, cut in moves:
            if len(tokens) + k + 1 > CONTEXT:
                break
            if rounds is whole.rounds:
                whole.poison(k)
                outcome, drafts = whole.run(list(tokens), k, uniforms)
            else:
                outcome = rounds.run(list(tokens), k, uniforms)
                drafts = rounds.buffers.block[0, 2 : 2 + k].tolist()
            seen.append((outcome.tokens, outcome.num_accepted, drafts))
            kept = max(1, len(outcome.tokens) - cut)
            tokens += outcome.tokens[:kept]
            rounds.rollback(len(tokens))
        found.append(seen)
    assert found[0] == found[1]


def test_most_rounds_are_whole_and_most_drafts_accepted(path: Path) -> None:
    """What the comparison above is about: not two ways of drafting nothing."""
    whole, uniforms = Whole(path), uniform_table(0, CONTEXT + 1)
    rounds, tokens = whole.rounds, list(PROMPT)
    rounds.begin(SamplingParams(), PROMPT)
    tokens += rounds.prefill(list(PROMPT), uniforms).tokens
    accepted = drafted = 0
    while len(tokens) + 3 <= CONTEXT:
        outcome = rounds.run(list(tokens), 2, uniforms)
        tokens += outcome.tokens
        accepted, drafted = accepted + outcome.num_accepted, drafted + outcome.num_drafted
    assert whole.program(2) is not None
    medusa = isinstance(rounds.drafter, MedusaDrafter)  # whose heads are random
    assert accepted > (0 if medusa else drafted / 2)


@pytest.mark.parametrize("field", STALE)
def test_a_program_that_kept_an_input_is_found(path: Path, field: str) -> None:
    """The comparison fails for a capture that baked a host value in."""

    class Stale:
        def __init__(self, calls, up):  # type: ignore[no-untyped-def]
            self.calls, self.up, self.start, self.kept = calls, up, 0, np.zeros(0, np.uint8)

        def run(self) -> float:
            self.up[self.start : self.start + len(self.kept)] = self.kept
            return sum(call.run() for call in self.calls)  # type: ignore[attr-defined]

    if field in CACHED and not (path / "onnx" / "draft.onnx").exists():
        pytest.skip("Medusa's heads have no cache")
    made: list[Stale] = []

    def make(calls, _context, up, _down):  # type: ignore[no-untyped-def]
        made.append(Stale(calls, up))
        return made[-1]

    whole, steps = Whole(path, make), load_rounds(path, Bundle.load(path).manifest, ONE)
    uniforms, differs = uniform_table(3, CONTEXT + 1), False
    tokens = _begun(steps, uniforms)
    assert _begun(whole.rounds, uniforms) == tokens
    for i in range(6):
        launched, drafts = whole.run(list(tokens), 3, uniforms)
        if i == 0:
            program = whole.program(3)
            assert program is not None
            value = program.arena[field]
            made[0].start = value.ctypes.data - made[0].up.ctypes.data
            made[0].kept = np.frombuffer(value.tobytes(), np.uint8).copy()
        stepped = steps.run(list(tokens), 3, uniforms)
        expected = steps.buffers.block[0, 2:5].tolist()
        differs = differs or (launched.tokens, drafts) != (stepped.tokens, expected)
        tokens += stepped.tokens
        for rounds in (steps, whole.rounds):
            rounds.rollback(len(tokens))
    assert differs, f"{field} was kept from the first launch and nobody noticed"


def _begun(rounds: Rounds, uniforms: np.ndarray) -> list[int]:
    rounds.begin(SAMPLED, PROMPT)
    return [*PROMPT, *rounds.prefill(list(PROMPT), uniforms).tokens]


@pytest.mark.parametrize("shift", [-1, 1])
def test_features_of_a_neighbouring_row_show(
    path: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """What a launch gives back one row off: the next one drafts from wrong states."""
    whole, steps = Whole(path), load_rounds(path, Bundle.load(path).manifest, ONE)
    uniforms, differs = uniform_table(3, CONTEXT + 1), False
    tokens = _begun(steps, uniforms)
    _begun(whole.rounds, uniforms)
    real = FeatureStore.put
    for _ in range(6):
        with monkeypatch.context() as planted:
            planted.setattr(
                FeatureStore, "put", lambda self, start, rows: real(self, start + shift, rows)
            )
            _, drafts = whole.run(list(tokens), 3, uniforms)
        stepped = steps.run(list(tokens), 3, uniforms)
        differs = differs or drafts != steps.buffers.block[0, 2:5].tolist()
        tokens += stepped.tokens
        for rounds in (steps, whole.rounds):
            rounds.rollback(len(tokens))
    assert differs


def test_too_short_a_text_takes_the_steps(path: Path) -> None:
    """An EAGLE head's round of k drafts reads k + 1 pairs, which two tokens don't have."""
    whole, uniforms = Whole(path), uniform_table(3, CONTEXT + 1)
    rounds = whole.rounds
    rounds.begin(SAMPLED, [1])
    tokens = [1, *rounds.prefill([1], uniforms).tokens]
    assert rounds.run(list(tokens), 2, uniforms).num_drafted == 2
    if isinstance(rounds.drafter, EagleDrafter):
        assert not whole.captured.programs.captured


def test_more_drafts_than_heads_take_the_steps(path: Path) -> None:
    whole, uniforms = Whole(path), uniform_table(3, CONTEXT + 1)
    tokens = _begun(whole.rounds, uniforms)
    found = prepared(whole.rounds.drafter, tokens, K + 1, uniforms, SAMPLED)
    assert (found is None) == isinstance(whole.rounds.drafter, MedusaDrafter)
