"""What a comparison is asked for, checked at the door."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Settings:
    """tokens: of each prompt's text, shared evenly by the temperatures; k: drafts a round; rounds:
    for each prompt and temperature; free_prompts: of all, whose texts all four pairs write, too;
    layer_tokens: that each layer's rounding is measured on, 0 leaves layers out."""

    tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    k: int = 4
    rounds: int = 2
    free_prompts: int = 2
    layer_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"k": 1, "rounds": 1, "free_prompts": 0, "layer_tokens": 0, "seed": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise _invalid(name, getattr(self, name), f"at least {low}")
        temperatures = self.temperatures
        if not temperatures or not all(0 <= t < math.inf for t in temperatures):
            raise _invalid("temperatures", temperatures, "finite numbers of at least 0")
        if len(set(temperatures)) < len(temperatures):
            raise _invalid("temperatures", temperatures, "each one once")
        if self.path_tokens < 1:
            raise _invalid(
                "tokens", self.tokens, f"at least one a temperature: {len(temperatures)}"
            )

    @property
    def path_tokens(self) -> int:
        """Of each text, one a prompt and temperature."""
        return self.tokens // max(1, len(self.temperatures))


def parse_temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise _invalid("temperatures", text, "numbers with commas between, as 0,0.7,1") from error


def _invalid(name: str, received: object, expected: str) -> InvalidRequest:
    flag = f"--{name.replace('_', '-')}" if name != "k" else "-k"
    return InvalidRequest(f"{flag}: received {received!r}. Expected {expected}.")
