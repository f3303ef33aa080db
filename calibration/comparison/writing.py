"""Text written round by round, all of it decided by uniforms that belong to its place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from runtime.uniforms import ACCEPT, DRAFT, DRAW, uniform_table

from ..prompts import TokenizedPrompt
from .drafting import Drafter
from .rounds import judge, verify
from .settings import Settings
from .sides import Side

Array = NDArray[Any]

WRITING_K = 6  # drafts a round of the reference's text


class Place:
    """A prompt and a temperature, and the uniforms that belong to them and to nothing else."""

    def __init__(self, prompt: TokenizedPrompt, temperature: float, settings: Settings) -> None:
        self.prompt = prompt
        self.temperature = temperature
        self.path_tokens = settings.path_tokens
        self._settings = settings

    def uniforms(self, purpose: str) -> Array:
        """[purpose, position] f32, position 0 the first token behind the prompt."""
        key = f"{self._settings.seed}/{purpose}/{self.prompt.id}/{self.temperature!r}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return uniform_table(
            seed, self._settings.path_tokens + max(self._settings.k, WRITING_K) + 1
        )


def write(
    place: Place,
    verifier: Side,
    drafter: Drafter,
    k: Callable[[int], int],  # drafts of a round, by the tokens that the text still lacks
    end: frozenset[int],
) -> tuple[list[int], int]:
    """A text by rounds, up to a token of `end`, and how many rounds it took."""
    prompt, uniforms = place.prompt.tokens, place.uniforms("text")
    verifier.begin(prompt)
    drafter.begin()
    text: list[int] = []
    rounds = 0
    while len(text) < place.path_tokens and not end.intersection(text):
        done, known = len(text), [*prompt, *text]
        count = k(place.path_tokens - done)
        drafted = drafter.propose(known, count, place.temperature, uniforms[DRAFT, done:])
        verifier.rewind(done)
        p = verify(verifier.target, known[-1], drafted.tokens, place.temperature)
        judged = judge(p, drafted, *deciding(uniforms, done, count))
        text += [*drafted.tokens[: judged.num_accepted], judged.next_token]
        rounds += 1
    return text, rounds


def deciding(uniforms: Array, start: int, k: int) -> tuple[Array, Array]:
    """What decides a round's accept tests [k] and its draw [k + 1]."""
    return uniforms[ACCEPT, start : start + k], uniforms[DRAW, start : start + k + 1]
