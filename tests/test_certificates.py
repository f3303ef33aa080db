"""Certificates pass on sound bundles and catch each fault that is planted in the graphs.

False alarms: a frequency certificate of a sound bundle fails once in 10⁶ runs for each sampling
(FALSE_ALARM); the others compare exactly or against a stated bound and never fail by chance.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers_runtime import VOCAB, near_table, target_table, write_bundle
from typer.testing import CliRunner

from export import accept_graph, draft_tail, transforms_graph
from export.adjust_graph import rows_behind_drafts
from export.certificates import check, contract, frequency, greedy, law
from export.certificates.frequency import chi_square_limit, fit
from export.certificates.report import Certificate
from export.certificates.round_graphs import RoundGraphs
from export.certificates.target_rows import TargetRows
from export.certificates.world import CASES, LawCase, World
from export.cli import app
from export.control_flow import Op
from runtime.bundle import Bundle
from runtime.decoder import Decoder
from runtime.engine import load_rounds
from runtime.executor import EngineOptions
from runtime.sampling import SamplingParams

PENALISED = SamplingParams(temperature=1.0, repetition_penalty=1.6, presence_penalty=0.9)
OPTIONS = EngineOptions(threads=1, spin=False)
PROMPT = [1, 2, 3, 4]
FEW = 6  # tokens


def q_before_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs 1: the draft samples under top-k, the rule is told the raw softmax."""
    sound = draft_tail._sample

    def faulty(op: Op, logits, step):
        token, _ = sound(op, logits, step)
        warm = op.Max(op.Unsqueeze(step.temperature, [1, 2]), 0.01)
        return [token, op.Softmax(op.Div(logits, warm), axis=-1)]

    monkeypatch.setattr(draft_tail, "_sample", faulty)


def residual_not_renormalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw takes u itself for u times the residual's mass."""
    sound = accept_graph.draw

    def faulty(op: Op, weights, uniforms, *, size):
        total = op.ReduceSum(weights, [1])
        scaled = op.Min(op.Div(uniforms, total), float(np.nextafter(np.float32(1), np.float32(0))))
        return sound(op, weights, scaled, size=size)

    monkeypatch.setattr(accept_graph, "draw", faulty)


def bonus_from_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = accept_graph.pick_rows

    def faulty(op: Op, x, row):
        last = op.Sub(op.Shape(x, start=1, end=2), 1)
        before = op.Max(op.Sub(row, 1), 0)
        return sound(op, x, op.Where(op.Equal(row, last), before, row))

    monkeypatch.setattr(accept_graph, "pick_rows", faulty)
    monkeypatch.setattr(transforms_graph, "pick_rows", faulty)


def penalties_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs 4: no row sees the drafts in front of it."""

    def faulty(op: Op, visible):
        return op.Mul(rows_behind_drafts(op, visible), 0.0)

    monkeypatch.setattr(accept_graph, "rows_behind_drafts", faulty)


Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS = (q_before_top_k, residual_not_renormalised, bonus_from_the_row_before, penalties_frozen)


def tiny(path: Path, vocab: int = VOCAB, noise: float = 1.0) -> Path:
    """A bundle whose draft is often wrong; with few tokens they repeat, as penalties need it."""
    table = target_table(vocab, sharpness=1.5)
    return write_bundle(path, table, near_table(table, noise), max_draft_tokens=4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.load(tiny(tmp_path_factory.mktemp("sound") / "bundle"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_law_of_a_round_is_the_targets(case: LawCase) -> None:
    for world in (World(vocab=4, k=1), World(vocab=4, k=2, drafts=(0, 2, 3), seed=1)):
        assert law.distance(case, world, RoundGraphs.small(world)) <= law.LIMIT


def test_law_through_a_bundles_own_accept_graph(bundle: Bundle) -> None:
    world, places = law.few_tokens(bundle)
    graphs = RoundGraphs.own(bundle.model_path("accept"), places)
    for case in CASES:
        assert law.distance(case, world, graphs) <= law.LIMIT, case.name


@pytest.mark.parametrize("fault", FAULTS)
def test_law_catches(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    world = World(vocab=4, k=1)
    graphs = RoundGraphs.small(world)
    cases = [case for case in CASES if case.name in ("top_k", "presence_penalty")]
    assert max(law.distance(case, world, graphs) for case in cases) > 1e-3


def test_frequency_of_a_sound_bundle(bundle: Bundle) -> None:
    found = _frequency(bundle, 200)
    assert found.status == "passed", found.reason
    assert {one["samples"] for one in found.figures.values()} == {200}


@pytest.mark.parametrize(
    ("fault", "sampling", "vocab", "noise"),
    [
        (q_before_top_k, "top_k", VOCAB, 0.7),
        (residual_not_renormalised, "top_k", FEW, 2.5),
        (bonus_from_the_row_before, "top_k", FEW, 1.0),
        (penalties_frozen, "penalties + top_k + top_p", FEW, 1.0),
    ],
)
def test_frequency_catches(
    fault: Fault,
    sampling: str,
    vocab: int,
    noise: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    bundle = Bundle.load(tiny(tmp_path / "bundle", vocab, noise))
    found = _frequency(bundle, 800, sampling)
    assert found.failed
    assert "chi-square" in found.reason


@pytest.mark.parametrize("sampling", frequency.SAMPLINGS)
def test_frequency_of_a_sound_bundle_of_few_tokens(sampling: str, tmp_path: Path) -> None:
    """What the faults above are told apart from."""
    found = _frequency(Bundle.load(tiny(tmp_path / "bundle", FEW)), 800, sampling)
    assert found.status == "passed", found.reason


def _frequency(bundle: Bundle, samples: int, *names: str) -> Certificate:
    asked = {name: frequency.SAMPLINGS[name] for name in names or frequency.SAMPLINGS}
    with Decoder.load(bundle.path, threads=1, spin=False) as decoder:
        return frequency.certify(decoder, _rows(bundle), PROMPT, samples, samplings=asked)


def _rows(bundle: Bundle) -> TargetRows:
    manifest = bundle.manifest
    rounds = load_rounds(bundle.path, manifest, OPTIONS)
    return TargetRows(rounds, manifest.limits.max_context)


def test_chi_square_limit_is_exceeded_by_chance_as_stated() -> None:
    """1e-2 here, so that 20,000 draws show it: 200 expected, 130 to 270 is ±5 sigma."""
    rng = np.random.default_rng(0)
    values = rng.chisquare(26, 20_000)
    assert 130 < (values > chi_square_limit(26, 1e-2)).sum() < 270


def test_a_right_bundle_exceeds_the_limit_no_oftener_than_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At odds of 1e-3, so that 20,000 draws show it: 20 expected; 60 is a factor of three.

    Most outcomes are unlikely here, and a few are expected less than once.
    """
    monkeypatch.setattr(frequency, "FALSE_ALARM", 1e-3)
    rng = np.random.default_rng(1)
    mass = 0.5 ** np.arange(1, 28)
    mass /= mass.sum()
    laws = {(i,): float(p) for i, p in enumerate(mass)}
    draws = rng.multinomial(250, mass, 20_000)
    fits = [fit(Counter({(i,): int(n) for i, n in enumerate(row)}), laws) for row in draws]
    assert sum(one.chi_square > one.limit for one in fits) < 60


def test_an_outcome_that_the_target_never_gives_does_not_fit() -> None:
    found = fit(Counter({(1,): 50, (2,): 49, (3,): 1}), {(1,): 0.5, (2,): 0.5})
    assert not found.fits
    assert found.impossible == 1


def test_greedy_of_a_sound_bundle(bundle: Bundle) -> None:
    prompts = [[5, 6, i] for i in range(40)]
    found = greedy.certify(_rows(bundle), prompts, 3)
    assert found.status == "passed"
    assert found.figures["equal_texts"] == found.figures["prompts"] == 40
    assert found.figures["noise"] == 0.0
    assert found.figures["accepted_draft_tokens"] > 0


def test_greedy_catches_a_row_taken_from_the_wrong_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def previous(op: Op, given, drafts):
        """Every row but the first is judged by the row before it."""
        best = op.ArgMax(given.logits, axis=2, keepdims=0)
        shifted = op.Concat(op.Slice(best, [0], [1], [1]), op.Slice(best, [0], [-1], [1]), axis=1)
        matches = op.Equal(given.draft_tokens, op.GatherElements(shifted, given.parents, axis=1))
        accepted, last = accept_graph._path(op, given, op.And(matches, drafts.drawable))
        token = op.GatherElements(shifted, last, axis=1)
        return [op.Squeeze(x, [1]) for x in (accepted, token, last)]

    monkeypatch.setattr(accept_graph, "_greedy", previous)
    faulty = Bundle.load(tiny(tmp_path / "bundle"))
    found = greedy.certify(_rows(faulty), [[5, 6, i] for i in range(20)], 3)
    assert found.failed
    assert "beyond the noise" in found.reason


def test_contract_of_a_sound_bundle(bundle: Bundle) -> None:
    found = contract.certify(bundle)
    assert found.status == "passed"
    assert found.figures["vocab_size"] == VOCAB


def test_contract_catches_the_map_of_another_draft(tmp_path: Path) -> None:
    """Bugs 18: all shapes fit, and acceptance would collapse silently."""
    table = target_table(VOCAB)
    kept = np.arange(0, VOCAB, 2)
    path = write_bundle(tmp_path / "bundle", table, table[:, kept], d2t=kept - np.arange(len(kept)))
    sound = Bundle.load(path)
    assert contract.certify(sound).status == "passed"
    assert sound.d2t is not None
    shifted = Bundle(**{**vars(sound), "d2t": sound.d2t + (np.arange(len(kept)) > 3)})
    found = contract.certify(shifted)
    assert found.failed
    assert "draft.onnx holds another map" in found.reason
    assert "accept.onnx holds another map" in found.reason


def test_contract_catches_a_draft_of_another_width(int4_bundle: Path, tmp_path: Path) -> None:
    """Bugs 17. The files are read as they are, whatever the manifest says of them."""
    bundle = Bundle.load(int4_bundle)
    found = contract.certify(bundle)
    assert found.status == "passed"
    assert found.figures["hidden_size"] == found.figures["draft_hidden_size"] == 64
    copy = shutil.copytree(int4_bundle, tmp_path / "bundle")
    draft = onnx.load(copy / "onnx" / "draft.onnx", load_external_data=False)
    for node in draft.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "K":
                attribute.i += 32
    (copy / "onnx" / "draft.onnx").write_bytes(draft.SerializeToString())
    found = contract.certify(replace(bundle, path=copy))
    assert found.reason == "hidden size: received a draft of 96. Expected 64, the target's"


def test_contract_finds_the_width_in_f32_too(fp32_bundle: Path) -> None:
    found = contract.certify(Bundle.load(fp32_bundle))
    assert found.figures["hidden_size"] == found.figures["draft_hidden_size"] == 64


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The law's other worlds have tests of their own."""
    monkeypatch.setattr(law, "SMALL", {"3 tokens": World(vocab=3, k=1)})
    return None


@pytest.mark.usefixtures("quick")
def test_command_prints_stores_and_passes(tmp_path: Path) -> None:
    path = tiny(tmp_path / "bundle")
    result = CliRunner().invoke(app, ["check", str(path), "--prompts", "12", "--samples", "100"])
    assert result.exit_code == 0, result.output
    for name in ("contract", "law", "greedy", "frequency"):
        assert name in result.stdout
    stored = json.loads((path / check.REPORT).read_text())
    assert [one["status"] for one in stored["certificates"]] == ["passed"] * 4
    assert "as built" in stored["claim"]
    assert Bundle.load(path)  # a report is no part of what is hashed


@pytest.mark.usefixtures("quick")
def test_command_exits_1_on_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny(tmp_path / "bundle")
    monkeypatch.setattr(law, "LIMIT", -1.0)
    arguments = ["check", str(path), "--prompts", "2", "--samples", "50", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    found = {one["name"]: one["status"] for one in json.loads(result.stdout.splitlines()[-1])}
    assert found["law"] == "failed"
    assert found["contract"] == "passed"


@pytest.mark.usefixtures("quick")
def test_a_bundle_without_a_draft_says_what_was_skipped(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "bundle", target_table(VOCAB), None)
    found = {one.name: one for one in check.check(path)}
    assert found["greedy"].status == found["frequency"].status == "skipped"
    assert "no draft" in found["greedy"].reason
    assert found["contract"].status == "passed"


def test_penalties_make_a_difference_here() -> None:
    """The cases would prove nothing where the penalties never change a law."""
    world = World(vocab=4, k=2)
    graphs = RoundGraphs.small(world)
    plain = LawCase(name="plain", params=SamplingParams(temperature=1.0))
    penalised = LawCase(name="penalised", params=PENALISED)
    one, other = (law.round_law(case, world, graphs) for case in (plain, penalised))
    assert law.total_variation(one, other) > 0.05


def test_a_token_at_a_cuts_edge_is_told_from_one_beyond_it(bundle: Bundle) -> None:
    """With the k-th token nearer than the noise, a row among others may keep the next one."""
    rows = _rows(bundle)
    params = frequency.SAMPLINGS["top_k"]
    falling = np.argsort(-rows.behind(PROMPT))
    logits = rows.behind(PROMPT)
    gap = float(logits[falling[2]] - logits[falling[3]])
    outcome = (int(falling[3]), *_likeliest(rows, int(falling[3])))
    counts = Counter({outcome: 2})
    near = [frequency._near_edge(counts, rows, PROMPT, params, gap * f) for f in (0.9, 1.1)]
    assert near == [0, 2]


def _likeliest(rows: TargetRows, first: int) -> list[int]:
    tokens = [first]
    while len(tokens) < frequency.TOKENS:
        tokens.append(int(rows.behind([*PROMPT, *tokens]).argmax()))
    return tokens[1:]
