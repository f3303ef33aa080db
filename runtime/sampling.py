"""What a user may ask of sampling, checked at the door.

Field names follow Hugging Face's generation config and the OpenAI API. The transforms themselves
run inside the ONNX graphs, in this order: repetition, presence and frequency penalty → logit bias →
bans, minimum length and grammar → temperature → top-k → top-p → min-p → normalise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, SupportsIndex

from .errors import InvalidRequest
from .grammar import Grammar

MAX_F32 = 3.4e38
MOST_REPETITION = 1e4  # beyond it, or below its inverse, a penalised logit may leave f32
PENALTY = "a number from -2 to 2"
REPETITION = f"a number from {1 / MOST_REPETITION:g} to {MOST_REPETITION:g}; 1 changes nothing"
BIAS = "token ids with a number from -100 to 100 each; banned_tokens bans one for certain"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request; values out of range raise InvalidRequest naming the field.

    temperature: 0 is greedy (ties go to the lowest id); top_k: 0 keeps all; top_p: 1 keeps all;
    min_p: 0 keeps all; repetition_penalty: divides the positive and multiplies the negative logits
    of tokens in the prompt or the answer, 1 changes nothing; presence_penalty, frequency_penalty:
    taken off the logits of tokens in the answer, once or for each time; logit_bias: added, by token
    id; banned_tokens: never drawn; min_tokens: no end token before the answer has as many; grammar:
    what the answer must be (runtime.Grammar); seed: None draws one at random, and the stats tell
    which; max_tokens: None goes on to the end token or the context limit; stop: strings that end
    the text, themselves left out; ignore_eos: go on past the model's end token (for measuring).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    banned_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "banned_tokens", _ids("banned_tokens", self.banned_tokens))
        self._check_numbers()
        self._check_counts()
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise _invalid("grammar", self.grammar, "a runtime.Grammar, or None")
        if not isinstance(self.ignore_eos, bool):
            raise _invalid("ignore_eos", self.ignore_eos, "True or False")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties)

    @property
    def masked(self) -> bool:
        """Whether some token is forbidden at some point."""
        return bool(self.banned_tokens or self.min_tokens or self.grammar)

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, MAX_F32, "a finite number of at least 0")
        _number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and at most 1", above=True)
        _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        penalty = self.repetition_penalty
        _number("repetition_penalty", penalty, 1 / MOST_REPETITION, MOST_REPETITION, REPETITION)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, PENALTY)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, PENALTY)

    def _check_counts(self) -> None:
        _integer("top_k", self.top_k, 0, "an integer of at least 0; 0 keeps every token")
        _integer("min_tokens", self.min_tokens, 0, "an integer of at least 0")
        if self.seed is not None:
            _integer("seed", self.seed, 0, "an integer from 0 to 2**64 - 1, or None")
            if self.seed >= 2**64:
                raise _invalid("seed", self.seed, "an integer from 0 to 2**64 - 1, or None")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, "an integer of at least 1, or None")
            if self.min_tokens > self.max_tokens:
                expected = f"at most max_tokens, {self.max_tokens}"
                raise _invalid("min_tokens", self.min_tokens, expected)


def _invalid(field: str, received: object, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: received {received!r}. Expected {expected}.")


def _number(
    field: str, value: Any, low: float, high: float, expected: str, *, above: bool = False
) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):  # NaN is in no range
        raise _invalid(field, value, expected)


def _bias(value: object) -> Mapping[int, float]:
    """A copy that nobody else can change."""
    if not isinstance(value, Mapping):
        raise _invalid("logit_bias", value, BIAS)
    ids = _ids("logit_bias", value)
    for bias in value.values():
        _number("logit_bias", bias, -100.0, 100.0, BIAS)
    return dict(zip(ids, value.values(), strict=True))


def _ids(field: str, value: object) -> tuple[int, ...]:
    """Token ids; whether the model has them is known at the bundle's door."""
    expected = "token ids, integers of at least 0"
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise _invalid(field, value, expected)
    items = tuple(value)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, SupportsIndex) or item.__index__() < 0:
            raise _invalid(field, item, expected)
    return tuple(item.__index__() for item in items)


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
