"""Which tree pays: the likeliest drafts first, against every tree there is; and bench tells."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from export.build import BuildRequest, build
from runtime.bench.plan import Contestant, Run
from runtime.bench.prompts import Prompt
from runtime.bench.summary import Sample
from runtime.bench.tree_choice import best_chain, best_tree, level_seconds, measured_rates
from runtime.bench.tree_plot import kind_of
from runtime.cli import app
from runtime.tree_shape import parse_tree

Path_ = tuple[int, ...]


def chance(path: Path_, rates: list[list[float]]) -> float:
    result = 1.0
    for depth, rank in enumerate(path):
        result *= rates[depth][rank]
    return result


@given(
    rates=st.lists(st.lists(st.floats(0.01, 0.45), min_size=2, max_size=2), min_size=1, max_size=2),
    nodes=st.integers(1, 6),
)
@settings(deadline=None)
def test_no_tree_of_so_many_drafts_commits_more(rates: list[list[float]], nodes: int) -> None:
    """Of rates that fall with the rank, as acceptance does."""
    rates = [sorted(row, reverse=True) for row in rates]
    paths = [p for n in range(1, len(rates) + 1) for p in product(range(2), repeat=n)]
    nodes = min(nodes, len(paths))

    def whole(chosen: tuple[Path_, ...]) -> bool:
        return all(
            (len(p) == 1 or p[:-1] in chosen) and (p[-1] == 0 or (*p[:-1], 0) in chosen)
            for p in chosen
        )

    best = max(
        sum(chance(p, rates) for p in chosen)
        for chosen in combinations(paths, nodes)
        if whole(chosen)
    )
    tree, chances = best_tree(rates, nodes)
    assert tree.size == nodes
    assert sum(chances) == pytest.approx(best)


def test_a_chain_is_cut_where_nothing_was_measured() -> None:
    tree, chances = best_chain([[0.5, 0.2], [0.4, 0.0]], 9)
    assert tree.parents == (0, 1)
    assert chances == pytest.approx([0.5, 0.2])


def test_rates_are_of_rounds_that_got_to_the_depth() -> None:
    stats = {"reached_per_depth": [10, 4], "accepted_per_rank": [[3, 1, 0], [2, 0, 0]]}
    run = Run(
        contestant=Contestant(bundle="b", draft_length=parse_tree("3x1")),
        prompt=Prompt(id="p", category="c", content="x"),
        repeat=0,
    )
    samples = [Sample(run=run, token_ids=(), stats=stats)] * 2
    assert measured_rates(samples) == [[0.3, 0.1, 0.0], [0.5, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("draft_s", "verify_s", "level_s"), [(0.6, 5.0, 0.1), (0.0, 5.2, 0.2), (0.0, 3.9, 0.0)]
)
def test_drafts_of_a_launch_cost_what_verification_alone_does_not(
    draft_s: float, verify_s: float, level_s: float
) -> None:
    """Three rounds of two levels at 1 s to verify, and two plain ones at 0.5 s."""
    stats = {
        "drafted_per_position": [3, 3],
        "num_spec_steps": 3,
        "num_plain_steps": 2,
        "draft_s": draft_s,
        "verify_s": verify_s,
    }
    prompt = Prompt(id="p", category="c", content="x")
    run = Run(
        contestant=Contestant(bundle="b", draft_length=parse_tree("3x1")), prompt=prompt, repeat=0
    )
    sample = Sample(run=run, token_ids=(), stats=stats)
    found = level_seconds([sample], {0: 0.5, 4: 0.9, 6: 1.0, 8: 2.0})
    assert found == pytest.approx(level_s)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("plain", None),
        ("auto", None),
        ("k=3", "chain"),
        ("4x2", "static tree"),
        ("dynamic:8:5:4", "dynamic tree"),
    ],
)
def test_modes_by_kind(mode: str, kind: str | None) -> None:
    assert kind_of(mode) == kind


def test_bench_measures_trees_and_says_which_pays(
    kept_traces: None, tmp_path: Path, tiny_target: Path
) -> None:
    """Chain, static and dynamic beside each other, a table, and a plot that holds them."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib: pip install matplotlib")
    bundle = build(
        BuildRequest(
            target=str(tiny_target),
            draft="ngram",
            out=tmp_path / "bundle",
            precision="fp32",
            max_draft_tokens=4,
            max_tree_nodes=12,
        )
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the hand and the hand and the hand and the"}) + "\n")
    modes = "2,3x1x1,dynamic:6:3:2"
    line = f"bench {bundle} --prompts {prompts} -k {modes} --repeats 1 --max-tokens 24 --ignore-eos"
    asked = [*line.split(), "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    assert "Choosing a tree: bundle" in shown.output
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    (choice,) = result["trees"]
    assert choice["answer"] in " ".join(shown.output.split())
    assert [one["nodes"] for one in choice["trees"]] == sorted(
        one["nodes"] for one in choice["trees"]
    )
    figures = {f["mode"]: f for f in result["figures"] if f["category"] == "all"}
    assert set(figures) == {"plain", "k=2", "3x1x1", "dynamic:6:3:2"}
    assert all(f["same_as_plain"] in (None, 1.0) for f in figures.values())
    plot = (tmp_path / "out" / "trees.svg").read_text()
    assert plot.startswith("<?xml")
