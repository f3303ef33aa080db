"""What calibration reads: prompts as token ids, through the model's own tokenizer and template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.bench.prompts import Prompt, load_prompts
from runtime.errors import InvalidRequest
from runtime.text import Text

from .prompts import CALIBRATION

LEAST_TOKENS = 256  # fewer say next to nothing about a layer's inputs


@dataclass(frozen=True, kw_only=True)
class CalibrationTexts:
    """Token ids, in the order in which they are read."""

    texts: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()


def read_texts(files: Sequence[Path], text: Text, *, vocab: int, room: int) -> CalibrationTexts:
    """Those of `files`, the default set where there are none, cut to `room` tokens each.

    Raises InvalidRequest where a file can't be read or has too little text.
    """
    prompts = load_prompts(files or [CALIBRATION], [], None)
    encoded = [tuple(t % vocab for t in _tokens(p, text)[:room]) for p in prompts]
    found = CalibrationTexts(texts=tuple(tokens for tokens in encoded if tokens))
    if found.tokens < LEAST_TOKENS:
        raise InvalidRequest(
            f"--calibration-prompts: received {found.tokens} tokens of text. Expected at least "
            f"{LEAST_TOKENS}, better some thousands; give more prompts, or leave the option out "
            "for the default set."
        )
    return found


def _tokens(prompt: Prompt, text: Text) -> list[int]:
    """Chats through the template; a model without one reads what the messages say."""
    if isinstance(prompt.content, str):
        return text.encode(prompt.content)
    try:
        return text.encode_chat(prompt.content)
    except InvalidRequest:
        return text.encode("\n\n".join(str(m.get("content", "")) for m in prompt.content))
