"""What a user may ask of sampling, checked at the door.

Field names follow Hugging Face's generation config and the OpenAI API. The transforms themselves
run inside the ONNX graphs, in this order: temperature → top-k → top-p → min-p → normalise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request; values out of range raise InvalidRequest naming the field.

    temperature: 0 is greedy (ties go to the lowest id); top_k: 0 keeps all; top_p: 1 keeps all;
    min_p: 0 keeps all; seed: None draws one at random, and the stats tell which;
    max_tokens: None goes on to the end token or the context limit; stop: strings that end the
    text, themselves left out; ignore_eos: go on past the model's end token (for measuring).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        _number("temperature", self.temperature, 0.0, math.inf, "a finite number of at least 0")
        _integer("top_k", self.top_k, 0, "an integer of at least 0; 0 keeps every token")
        _number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and at most 1", above=True)
        _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        if self.seed is not None:
            _integer("seed", self.seed, 0, "an integer from 0 to 2**64 - 1, or None")
            if self.seed >= 2**64:
                raise _invalid("seed", self.seed, "an integer from 0 to 2**64 - 1, or None")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, "an integer of at least 1, or None")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise _invalid("stop", self.stop, "non-empty strings")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _invalid(field: str, received: object, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: received {received!r}. Expected {expected}.")


def _number(
    field: str, value: object, low: float, high: float, expected: str, *, above: bool = False
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type]
        raise _invalid(field, value, expected)
    if above and value == low:
        raise _invalid(field, value, expected)


def _integer(field: str, value: object, low: int, expected: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise _invalid(field, value, expected)
