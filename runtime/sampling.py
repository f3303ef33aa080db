"""What a user may ask of sampling, checked at the door.

Field names follow Hugging Face's generation config and the OpenAI API. The transforms themselves
run inside the ONNX graphs, in this order: temperature → top-k → top-p → min-p → normalise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import InvalidRequest

MAX_F32 = 3.4e38


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
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        _number("temperature", self.temperature, 0.0, MAX_F32, "a finite number of at least 0")
        _integer("top_k", self.top_k, 0, "an integer of at least 0; 0 keeps every token")
        _number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and at most 1", above=True)
        _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        if self.seed is not None:
            _integer("seed", self.seed, 0, "an integer from 0 to 2**64 - 1, or None")
            if self.seed >= 2**64:
                raise _invalid("seed", self.seed, "an integer from 0 to 2**64 - 1, or None")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, "an integer of at least 1, or None")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _invalid(field: str, received: object, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: received {received!r}. Expected {expected}.")


def _number(
    field: str, value: object, low: float, high: float, expected: str, *, above: bool = False
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _invalid(field, value, expected)
    if not low <= value <= high or (above and value == low):  # NaN is never within
        raise _invalid(field, value, expected)


def _strings(field: str, value: object) -> tuple[str, ...]:
    """Non-empty strings; a lone one is what a user may well give."""
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable):
        raise _invalid(field, value, "non-empty strings")
    strings = tuple(strings)
    if not all(isinstance(s, str) and s for s in strings):
        raise _invalid(field, value, "non-empty strings")
    return strings


def _integer(field: str, value: object, low: int, expected: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise _invalid(field, value, expected)
