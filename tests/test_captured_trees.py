"""Decisions over trees as one program, on ONNX Runtime's executor: as step by step, whatever was
there before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers_build import K
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tree import trees

from export.build import BuildRequest, build
from runtime.bundle import Bundle
from runtime.captured_calls import MakeProgram, sequentially
from runtime.captured_programs import RoundShape
from runtime.captured_tree import CapturedTrees, TreeEngines
from runtime.capturing import Capturing
from runtime.contract import accept_graph, target_graph
from runtime.engine import load_rounds
from runtime.executor import EngineOptions, Executor
from runtime.sampling import SamplingParams
from runtime.tree import Tree
from runtime.uniforms import uniform_table

ONE = EngineOptions(threads=1, spin=False)
NODES, CONTEXT, VOCAB = 8, 96, 40  # tokens that are tried
LENIENT = 0.005  # of uniforms: about every second draft passes, though any token is as unlikely
SAMPLED = SamplingParams(temperature=1.3)
PARAMS = st.sampled_from(
    [SamplingParams(), SAMPLED, SamplingParams(temperature=0.9, top_k=40, min_p=0.001)]
)
Outcome = tuple[int, int, int, int]


@pytest.fixture(scope="module")
def bundle(kept_traces: None, build_root: Path, tiny_target: Path) -> Bundle:
    request = BuildRequest(
        target=str(tiny_target),
        draft="ngram",
        out=build_root / "captured-trees",
        precision="fp32",
        max_context=CONTEXT,
        max_draft_tokens=K,
        max_tree_nodes=NODES,
    )
    return Bundle.load(build(request))


class Both:
    """One sequence over one set of caches, decided step by step and by programs."""

    def __init__(self, bundle: Bundle, make: MakeProgram = sequentially) -> None:
        manifest, onnx = bundle.manifest, bundle.path / "onnx"
        self.rounds = load_rounds(bundle.path, manifest, ONE)
        self.context = manifest.limits.max_context
        spec = target_graph(manifest.target.cache)
        self.captured = CapturedTrees(
            TreeEngines(
                target=Executor.load(onnx / "target.onnx", spec, ONE),
                accept=Executor.load(onnx / "accept.onnx", accept_graph(), ONE),
                target_caches=self.rounds.target.caches,
            ),
            self.rounds.buffers,
            None,
            Capturing.by_calls((self.context,), make),
        )

    def begin(self, prompt: list[int], params: SamplingParams, seed: int) -> list[int]:
        self.uniforms = uniform_table(seed, CONTEXT, NODES)
        self.rounds.forget()
        self.rounds.begin(params, prompt)
        return [*prompt, *self.rounds.prefill(list(prompt), self.uniforms).tokens]

    def set(self, tokens: list[int], tree: Tree, drafts: list[int]) -> None:
        buffers = self.rounds.buffers
        buffers.set_last(tokens)
        buffers.block[0, 2 : 2 + tree.size] = drafts
        buffers.set_certain(tree.size)
        buffers.set_tree(tree, self.uniforms, len(tokens))
        buffers.accept_uniforms *= LENIENT

    def launched(self, size: int) -> Outcome:
        self.captured.decide(size)
        return self._outcome()

    def stepped(self, size: int) -> Outcome:
        self.rounds._decide_tree(size)
        return self._outcome()

    def _outcome(self) -> Outcome:
        b = self.rounds.buffers
        found = (b.num_accepted, b.next_token, b.last_row, b.new_lengths)
        values = tuple(int(one[0]) for one in found)
        for one in found:
            one[:] = -7  # so that who writes nothing is found
        return values  # type: ignore[return-value]

    def poison(self, size: int) -> None:
        """All that an earlier launch of this size left: NaN, lengths and tokens of -1."""
        shape = RoundShape(batch=1, drafts=size, context=self.context)
        if shape in self.captured.programs.captured:
            program = self.captured.programs.program(batch=1, drafts=size, rows=1)
            program.arena.memory[:] = 0xFF
            program.decision.logits[:] = np.nan
            program.decision.q[:] = np.nan


@pytest.fixture(scope="module")
def both(bundle: Bundle) -> Both:
    return Both(bundle)


@given(data=st.data(), params=PARAMS)
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_program_follows_its_inputs(
    both: Both, data: st.DataObject, params: SamplingParams
) -> None:
    """Any tree, text and sampling, drafts that are often the likeliest token: as step by step."""
    prompt = data.draw(st.lists(st.integers(5, VOCAB), min_size=2, max_size=20))
    tokens = both.begin(prompt, params, data.draw(st.integers(0, 99)))
    for _ in range(2):
        tree = data.draw(trees(most=NODES))
        if not tree.size:
            continue
        token = st.integers(5, VOCAB) | st.just(tokens[-1])
        drafts = data.draw(st.lists(token, min_size=tree.size, max_size=tree.size))
        both.set(tokens, tree, drafts)
        both.poison(tree.size)
        assert both.launched(tree.size) == both.stepped(tree.size)


@pytest.mark.parametrize("field", ["target_lengths", "block", "parents", "visible"])
def test_a_program_that_kept_an_input_is_found(bundle: Bundle, field: str) -> None:
    """The comparison above fails for a capture that baked a host value in."""
    kept: list[np.ndarray] = []

    def make(calls, _context, _up, _down):  # type: ignore[no-untyped-def]
        class Stale:
            def run(self) -> float:
                value = program().arena[field]
                if not kept:
                    kept.append(value.copy())
                value[...] = kept[0]
                return sum(call.run() for call in calls)

        return Stale()

    def program():  # type: ignore[no-untyped-def]
        return both.captured.programs.program(batch=1, drafts=3, rows=1)

    both, rng, differs = Both(bundle, make), np.random.default_rng(0), False
    shapes = [Tree(parents=(0, 0, 0)), Tree(parents=(0, 1, 2)), Tree(parents=(0, 1, 1))]
    for i in range(12):
        prompt = rng.integers(5, VOCAB, 4 + i).tolist()
        tokens = both.begin(prompt, SAMPLED, i)
        both.set(tokens, shapes[i % 3], rng.integers(5, VOCAB, 3).tolist())
        differs = differs or both.launched(3) != both.stepped(3)
    assert differs, f"{field} was kept from the first launch and nobody noticed"
