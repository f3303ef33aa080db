"""What the bundle's own engines give, seed after seed, against what its target alone would give.

The enumerated law proves the graphs; this proves the whole machine: caches, positions, uniforms,
rollback, the draft's own steps. With top-k 3 the first tokens of an answer have few outcomes, and
the target's plain rows tell how likely each is, so thousands of texts needn't be sampled twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from runtime.decoder import Decoder
from runtime.reference import History, adjusted, transformed
from runtime.round import Rounds
from runtime.sampling import SamplingParams
from runtime.tree import Tree
from runtime.tree_shape import DynamicTree, StaticTree, TreeShape

from .report import Certificate, judged
from .target_rows import TargetRows
from .world import Array, Laws, Tokens

NAME = "frequency"
CLAIM = "Sampled speculatively, tokens come as often as the target alone would give them."
FALSE_ALARM = 1e-6  # odds that a right bundle fails, for each sampling
LEAST_EXPECTED = 10.0  # cells below are joined, so that chi-square's law holds well into its tail
TOKENS = 3
DRAFT_TOKENS = (1, 2)  # by turns: behind one draft the third token is a bonus or recovered one

TREES: tuple[TreeShape, ...] = (
    StaticTree(tree=Tree.of_widths([2, 2])),
    DynamicTree(nodes=5, depth=2, width=3),
)

SAMPLINGS = {
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "penalties + top_k + top_p": SamplingParams(
        temperature=1.2, top_k=3, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.5,
        frequency_penalty=0.5,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Observed against expected counts of the same outcomes."""

    samples: int
    cells: int
    chi_square: float
    limit: float  # exceeded by chance with the odds FALSE_ALARM
    total_variation: float
    impossible: int  # outcomes that the target never gives
    near_edge: int = 0  # outcomes just beyond a transform's edge, within the rows' noise

    @property
    def fits(self) -> bool:
        return self.chi_square <= self.limit and not self.impossible


def certify(
    decoder: Decoder,
    rows: TargetRows,
    prompt: Sequence[int],
    samples: int,
    progress: Callable[[str], None] = lambda _: None,
    samplings: Mapping[str, SamplingParams] = SAMPLINGS,
    noise: float = 0.0,
) -> Certificate:
    """`samples` answers for each sampling, each with its own seed.

    noise: how much a row's top-2 margin moves with the number of rows in a call (the greedy
    certificate measures it). A token that near to a transform's edge may fall on either side.
    """
    figures, faults = {}, []
    for name, params in samplings.items():
        progress(f"{samples} answers under {name}")
        counts = _counts(decoder, prompt, params, samples, rows.rounds)
        found = fit(counts, law(rows, prompt, params))
        if found.impossible:
            near = _near_edge(counts, rows, prompt, params, noise)
            found = replace(found, impossible=found.impossible - near, near_edge=near)
        figures[name] = vars(found) | {"false_alarm": FALSE_ALARM}
        if not found.fits:
            faults.append(
                f"{name}: chi-square {found.chi_square:.1f} over {found.cells} outcomes, limit "
                f"{found.limit:.1f}; {found.impossible} impossible ones"
            )
    return judged(NAME, CLAIM, figures, faults)


def law(rows: TargetRows, prompt: Sequence[int], params: SamplingParams) -> Laws:
    """Chance of every first TOKENS tokens, from plain rows of the target."""
    result: Laws = {(): 1.0}
    for _ in range(TOKENS):
        longer: Laws = {}
        for tokens, mass in result.items():
            p = transformed(_row(rows, prompt, tokens, params), params)
            longer |= {(*tokens, int(x)): mass * float(p[x]) for x in np.flatnonzero(p)}
        result = longer
    return result


def _row(rows: TargetRows, prompt: Sequence[int], tokens: Tokens, params: SamplingParams) -> Array:
    """Adjusted logits behind an answer's first tokens."""
    before = History(prompt=tuple(prompt), output=tokens)
    return adjusted(rows.behind([*prompt, *tokens]), params, before)


def _near_edge(
    counts: Counter[Tokens],
    rows: TargetRows,
    prompt: Sequence[int],
    params: SamplingParams,
    noise: float,
) -> int:
    """Answers with a token that the target cuts, none by more than `noise`."""
    found = 0
    for outcome, count in counts.items():
        cut = []
        for i, token in enumerate(outcome):
            logits = _row(rows, prompt, outcome[:i], params)
            kept = transformed(logits, params) > 0
            if not kept[token]:
                cut.append(float(logits[kept].min() - logits[token]))
        found += count if cut and max(cut) <= noise else 0
    return found


def _counts(
    decoder: Decoder, prompt: Sequence[int], params: SamplingParams, samples: int, rounds: Rounds
) -> Counter[Tokens]:
    found: Counter[Tokens] = Counter()
    ways = _ways(rounds)
    for seed in range(samples):
        asked = replace(params, seed=seed, max_tokens=TOKENS, ignore_eos=True)
        k, tree = ways[seed % len(ways)]
        result = decoder.generate(list(prompt), asked, num_draft_tokens=k, tree=tree)
        found[result.token_ids] += 1
    return found


def _ways(rounds: Rounds) -> list[tuple[int | None, TreeShape | None]]:
    """Draft lengths, and trees where the bundle makes them."""
    most = rounds.buffers.max_draft_tokens
    ways: list[tuple[int | None, TreeShape | None]] = [(min(k, most), None) for k in DRAFT_TOKENS]
    nodes = rounds.buffers.max_nodes
    if rounds.brancher is not None:
        ways += [(None, t) for t in TREES if t.nodes <= nodes and t.depth <= most]
    return ways


def fit(observed: Counter[Tokens], expected: Laws) -> Fit:
    """Pearson's chi-square over the outcomes, unlikely ones joined."""
    samples = observed.total()
    pairs = [(observed[key], samples * mass) for key, mass in expected.items()]
    cells = _joined(pairs)
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return Fit(
        samples=samples,
        cells=len(cells),
        chi_square=chi_square,
        limit=chi_square_limit(len(cells) - 1, FALSE_ALARM),
        total_variation=sum(abs(seen - wanted) for seen, wanted in pairs) / (2 * samples),
        impossible=sum(count for key, count in observed.items() if key not in expected),
    )


def _joined(pairs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Cells (seen, expected) with the unlikely ones in one, and that in the next if it's too light.

    A cell of which hardly anything is expected would fail a right bundle by a single answer.
    """
    cells: list[tuple[int, float]] = []
    seen, wanted = 0, 0.0
    for one_seen, one_wanted in sorted(pairs, key=lambda pair: pair[1]):
        seen, wanted = seen + one_seen, wanted + one_wanted
        if wanted >= LEAST_EXPECTED:
            cells.append((seen, wanted))
            seen, wanted = 0, 0.0
    if wanted:  # too light still: nothing heavier came behind it
        last = cells.pop() if cells else (0, 0.0)
        cells.append((last[0] + seen, last[1] + wanted))
    return cells


def chi_square_limit(freedom: int, odds: float) -> float:
    """What chi-square exceeds with these odds (Wilson and Hilferty, 1931)."""
    if freedom < 1:
        return 0.0
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + NormalDist().inv_cdf(1 - odds) * spread**0.5) ** 3)
