"""Text written round by round, all of it decided by uniforms that belong to its place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from runtime.uniforms import ACCEPT, DRAFT, DRAW, uniform_table

from ..prompts import TokenizedPrompt
from .graphs import Drafter
from .rounds import judge, propose, verify
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


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Who writes a text: `drafting` is the side whose graph drafts, `drafter` that graph."""

    verifier: Side
    drafting: Side
    drafter: Drafter
    k: Callable[[int], int]  # drafts of a round, by the tokens that the text still lacks


def write(place: Place, writing: Writing, end: frozenset[int]) -> tuple[list[int], int]:
    """A text by rounds, up to a token of `end`, and how many rounds it took."""
    prompt, uniforms = place.prompt.tokens, place.uniforms("text")
    for side in {id(s): s for s in (writing.verifier, writing.drafting)}.values():
        side.begin(prompt)
    text: list[int] = []
    rounds = unread = 0
    while len(text) < place.path_tokens and not end.intersection(text):
        done, known = len(text), [prompt[-1], *text]
        k = writing.k(place.path_tokens - done)
        writing.drafting.rewind(done - unread)
        behind = known[done - unread :]
        drawing = uniforms[DRAFT, done:]
        drafted = propose(writing.drafter, behind, k, place.temperature, drawing)
        writing.verifier.rewind(done)
        p = verify(writing.verifier.target, known[-1], drafted.tokens, place.temperature)
        judged = judge(p, drafted, *deciding(uniforms, done, k))
        text += [*drafted.tokens[: judged.num_accepted], judged.next_token]
        unread = int(judged.num_accepted == k)  # the last draft was not read by the drafter
        rounds += 1
    return text, rounds


def deciding(uniforms: Array, start: int, k: int) -> tuple[Array, Array]:
    """What decides a round's accept tests [k] and its draw [k + 1]."""
    return uniforms[ACCEPT, start : start + k], uniforms[DRAW, start : start + k + 1]
