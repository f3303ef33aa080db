"""One prompt, with and without speculation, side by side: text, acceptance, speed.

    python examples/compare.py build/demo "def median(values):"

Both ways run in turn, three times each, and the medians are shown. Greedy, so the two texts agree
but for near ties that rounding decides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runtime import Decoder, SamplingParams

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
WAYS = {"plain": 0, "speculative": None}  # num_draft_tokens; None: the runtime chooses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    decoder = Decoder.load(args.bundle)
    params = SamplingParams(max_tokens=args.max_tokens)
    results = run(decoder, args.prompt, params, args.repeats)
    show(Console(), args.prompt, results)
    return 0


def run(decoder: Decoder, prompt: str, params: SamplingParams, repeats: int) -> dict[str, list]:
    """The results of each way, interleaved; the first pass warms up and is dropped."""
    results: dict[str, list] = {way: [] for way in WAYS}
    for turn in range(repeats + 1):
        for way, num_draft_tokens in WAYS.items():
            result = decoder.generate(prompt, params, num_draft_tokens=num_draft_tokens)
            if turn:
                results[way].append(result)
    return results


def show(console: Console, prompt: str, results: dict[str, list]) -> None:
    for way, runs in results.items():
        text = Text(prompt, style="dim") + Text(runs[0].text, style="default")
        console.print(Panel(text, title=way, title_align="left", expand=True))
    table = Table()
    table.add_column("")
    for way in results:
        table.add_column(way, justify="right")
    for name, values in rows(results).items():
        table.add_row(name, *values)
    console.print(table)
    at = parting(*(runs[0].token_ids for runs in results.values()))
    if at is not None:
        console.print(PARTED.format(at=at), highlight=False)


def parting(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The index of the first token that differs; None where there is none."""
    if tuple(first) == tuple(second):
        return None
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def rows(results: dict[str, list]) -> dict[str, list[str]]:
    """The table: one row a figure, one column a way."""
    firsts = [runs[0].stats for runs in results.values()]
    speeds = [median(r.stats.decode_tokens_per_s or 0.0 for r in runs) for runs in results.values()]
    return {
        "tokens": [str(s.num_output_tokens) for s in firsts],
        "tokens a target call": [f"{tokens_per_call(s):.2f}" for s in firsts],
        "drafts accepted": [percent(s.acceptance_rate) for s in firsts],
        "tokens/s": [f"{speed:.1f}" for speed in speeds],
        "against plain": [f"{speed / speeds[0]:.2f} ×" if speeds[0] else "–" for speed in speeds],
    }


def tokens_per_call(stats) -> float:
    calls = stats.num_spec_steps + stats.num_plain_steps
    return stats.num_decode_tokens / calls if calls else 0.0


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


if __name__ == "__main__":
    sys.exit(main())
