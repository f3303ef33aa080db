"""One prompt, without and with speculation, side by side: text, acceptance, speed.

    python examples/compare.py build/demo "def median(values):"

Plain decoding, the draft length that the runtime chooses, and one draft a round, so that drafting
is seen also where the runtime declines it. They run in turn, three times each; the medians are
shown. Greedy, so the texts agree but for near ties that rounding decides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle
from runtime.decoder import Result
from runtime.latency import LatencyProfile
from runtime.stats import Stats

PROMPT = '''def is_palindrome(text: str) -> bool:
    """True if text reads the same in both directions; case and spaces are ignored.

    >>> is_palindrome("Never odd or even")
    True
    """
'''
PARTED = (
    "The texts part after {at} tokens, at a near tie: below fp32 the engine rounds activations to\n"
    "int8, and rows that are verified together round otherwise than rows one at a time. The gate\n"
    "'engine' of `python -m export inspect` tells how much; with --precision fp32 they agree."
)
CHOICE = (
    "Left to choose, the runtime drafted in {drafted} of {rounds} rounds. Here a second row costs\n"
    "the target {row:.2f} of a step and drafting it {draft:.2f}, so that drafting gains where\n"
    "{needed}; the build measured {built}, this text gave {seen}."
)
PLAIN, CHOSEN, FIXED = "plain", "k chosen", "k = 1"

Results = Mapping[str, Sequence[Result]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    bundle = Bundle.load(args.bundle)
    params = SamplingParams(max_tokens=args.max_tokens)
    results = run(Decoder(bundle), ways(bundle), args.prompt, params, args.repeats)
    show(Console(), args.prompt, results, profile_of(bundle))
    return 0


def ways(bundle: Bundle) -> dict[str, int | None]:
    """num_draft_tokens by name; None leaves it to the runtime."""
    if not bundle.manifest.limits.max_draft_tokens:
        return {PLAIN: 0}
    return {PLAIN: 0, CHOSEN: None, FIXED: 1}


def profile_of(bundle: Bundle) -> LatencyProfile | None:
    return LatencyProfile.from_report(bundle.latency) if bundle.latency else None


def run(
    decoder: Decoder,
    chosen: Mapping[str, int | None],
    prompt: str,
    params: SamplingParams,
    repeats: int,
) -> dict[str, list[Result]]:
    """The results of each way, interleaved; the first pass warms up and is dropped."""
    results: dict[str, list[Result]] = {way: [] for way in chosen}
    for turn in range(repeats + 1):
        for way, num_draft_tokens in chosen.items():
            result = decoder.generate(prompt, params, num_draft_tokens=num_draft_tokens)
            if turn:
                results[way].append(result)
    return results


def show(console: Console, prompt: str, results: Results, profile: LatencyProfile | None) -> None:
    """Each text with the ways that gave it, the figures, and why the runtime chose as it did."""
    texts: dict[str, list[str]] = {}
    for way, runs in results.items():
        texts.setdefault(runs[0].text, []).append(way)
    for answer, same in texts.items():
        text = Text(prompt, style="dim") + Text(answer, style="default")
        console.print(Panel(text, title=", ".join(same), title_align="left", expand=True))
    console.print(table(results))
    plain = results[PLAIN][0].token_ids
    parted = [parting(plain, runs[0].token_ids) for runs in results.values()]
    if at := [found for found in parted if found is not None]:
        console.print(PARTED.format(at=min(at)), highlight=False)
    if profile is not None and FIXED in results:
        chosen, fixed = results[CHOSEN][0].stats, results[FIXED][0].stats
        console.print(choice(profile, chosen, fixed), highlight=False)


def table(results: Results) -> Table:
    made = Table()
    made.add_column("")
    for way in results:
        made.add_column(way, justify="right")
    for name, values in rows(results).items():
        made.add_row(name, *values)
    return made


def rows(results: Results) -> dict[str, list[str]]:
    """The table: one row a figure, one column a way."""
    firsts = [runs[0].stats for runs in results.values()]
    speeds = [median(r.stats.decode_tokens_per_s or 0.0 for r in runs) for runs in results.values()]
    return {
        "tokens": [str(s.num_output_tokens) for s in firsts],
        "drafted": [str(s.num_draft_tokens) for s in firsts],
        "of those accepted": [percent(s.acceptance_rate) for s in firsts],
        "tokens a target call": [f"{tokens_per_call(s):.2f}" for s in firsts],
        "tokens/s": [f"{speed:.1f}" for speed in speeds],
        "against plain": [f"{speed / speeds[0]:.2f} ×" if speeds[0] else "–" for speed in speeds],
    }


def choice(profile: LatencyProfile, chosen: Stats, fixed: Stats) -> str:
    """Why the runtime drafts or declines, from what the build measured on this machine."""
    step_s = profile.round_s(0)
    added_s = profile.round_s(1) - step_s
    kept_s = step_s - profile.read_s(2)  # saved by an accepted draft, less its later reading
    needed = added_s / kept_s if kept_s > 0 else 1.0
    return CHOICE.format(
        drafted=chosen.num_spec_steps,
        rounds=chosen.num_spec_steps + chosen.num_plain_steps,
        row=(added_s - profile.draft_s) / step_s,
        draft=profile.draft_s / step_s,
        needed="no share of accepted drafts would do"
        if needed >= 1
        else f"more than {percent(needed)} of drafts are accepted",
        built=percent(profile.acceptance),
        seen=percent(fixed.acceptance_rate),
    )


def parting(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The index of the first token that differs; None where there is none."""
    if tuple(first) == tuple(second):
        return None
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def tokens_per_call(stats: Stats) -> float:
    calls = stats.num_spec_steps + stats.num_plain_steps
    return stats.num_decode_tokens / calls if calls else 0.0


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


if __name__ == "__main__":
    sys.exit(main())
