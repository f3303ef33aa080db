"""A sequence: its committed tokens are the truth that every cache is reconciled to."""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"  # the model's end token
    STOP = "stop"  # a stop string
    LENGTH = "length"  # max_tokens
    GRAMMAR = "grammar"  # the grammar is complete and nothing may follow
    DEAD_END = "dead_end"  # grammar, bans and minimum length together leave no token
    CONTEXT = "context"  # the bundle's max_context
    CANCELLED = "cancelled"  # the stream was closed


class Sequence:
    """Prompt and generated tokens of one request."""

    def __init__(self, prompt: Items[int]) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(self.tokens)
        self.finish_reason: FinishReason | None = None

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    def commit(self, token: int) -> None:
        self.tokens.append(token)
