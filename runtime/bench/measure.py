"""Runs the requests of a plan through loaded bundles, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..decoder import Decoder
from ..errors import LimitExceeded
from ..sampling import SamplingParams
from .plan import Contestant, Run
from .prompts import Prompt
from .summary import Sample

WARM_UP_TOKENS = 8


def fitting_prompts(
    decoders: Iterable[Decoder], prompts: Sequence[Prompt], max_context: int, max_tokens: int
) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """The prompts that leave every bundle room for `max_tokens`, and the ids of the others."""
    unfit: dict[str, None] = {}
    for decoder in decoders:
        for prompt in prompts:
            if _length(decoder, prompt) + max_tokens > max_context:
                unfit[prompt.id] = None
    return tuple(prompt for prompt in prompts if prompt.id not in unfit), tuple(unfit)


def _length(decoder: Decoder, prompt: Prompt) -> float:
    try:
        return len(decoder.encode(prompt.content))
    except LimitExceeded:
        return float("inf")


def warm_up(
    decoders: Mapping[str, Decoder], contestants: Iterable[Contestant], prompt: Prompt
) -> None:
    """The first runs of a session allocate and page in weights: they are not measured."""
    for contestant in contestants:
        decoders[contestant.bundle].generate(
            prompt.content,
            SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True, seed=0),
            num_draft_tokens=contestant.num_draft_tokens,
            tree=contestant.tree,
        )


def measure(
    decoders: Mapping[str, Decoder],
    runs: Iterable[Run],
    params: SamplingParams,
    on_sample: Callable[[Sample], None],
) -> list[Sample]:
    """Every run's own statistics; `on_sample` hears of each as it ends."""
    samples = []
    for run in runs:
        result = decoders[run.contestant.bundle].generate(
            run.prompt.content,
            params,
            num_draft_tokens=run.contestant.num_draft_tokens,
            tree=run.contestant.tree,
        )
        sample = Sample(run=run, token_ids=result.token_ids, stats=result.stats.as_dict())
        samples.append(sample)
        on_sample(sample)
    return samples
