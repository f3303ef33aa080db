"""Prompts to calibrate and compare on, as the token ids that a bundle's model reads.

The layouts are the benchmark's (`runtime.bench.prompts`): text, chat messages, Spec-Bench and
SPEED-Bench; without a file a set in `data/`, written for this and licensed as the rest. Chats go
through the bundle's own template; a model without one reads what the messages say as plain text.
There are two sets: a recipe that reads text must not be judged on the text that it has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.bench.prompts import Prompt, load_prompts
from runtime.bundle import Bundle
from runtime.errors import InvalidRequest
from runtime.text import Text

_DATA = Path(__file__).resolve().parent / "data"
CALIBRATION = _DATA / "calibration.jsonl"  # what recipes read
HELD_OUT = _DATA / "held_out.jsonl"  # what bundles are compared on
LEAST_PROMPTS = 4  # fewer say nothing about how much prompts differ


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    id: str
    category: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """What will be read, and the ids of prompts that are too long for it."""

    prompts: tuple[TokenizedPrompt, ...]
    skipped: tuple[str, ...]


def read_prompts(files: Sequence[Path], limit: int | None, bundle: Bundle, room: int) -> PromptSet:
    """The prompts of `files` (HELD_OUT where there are none) of at most `room` tokens.

    limit: at most so many of each category. Raises InvalidRequest where too few are left.
    """
    encoded = _encode(load_prompts(files or [HELD_OUT], [], limit), text_of(bundle), bundle)
    fitting = tuple(p for p in encoded if 0 < len(p.tokens) <= room)
    _check_ids(fitting)
    if len(fitting) < LEAST_PROMPTS:
        raise InvalidRequest(
            f"--prompts: received {len(fitting)} prompts of 1 to {room} tokens, of {len(encoded)}. "
            f"Expected at least {LEAST_PROMPTS}: how far a difference is chance is told from how "
            "prompts differ; give more or shorter prompts, or fewer --tokens."
        )
    kept = {p.id for p in fitting}
    return PromptSet(prompts=fitting, skipped=tuple(p.id for p in encoded if p.id not in kept))


def text_of(bundle: Bundle) -> Text:
    manifest = bundle.manifest
    return Text(
        bundle.tokenizer_path, bundle.chat_template, manifest.bos_token_id, manifest.eos_token_ids
    )


def _encode(prompts: Sequence[Prompt], text: Text, bundle: Bundle) -> list[TokenizedPrompt]:
    return [
        TokenizedPrompt(id=p.id, category=p.category, tokens=tuple(_tokens(p, text, bundle)))
        for p in prompts
    ]


def _tokens(prompt: Prompt, text: Text, bundle: Bundle) -> list[int]:
    if isinstance(prompt.content, str):
        return text.encode(prompt.content)
    if bundle.chat_template is None:
        return text.encode("\n\n".join(str(m.get("content", "")) for m in prompt.content))
    return text.encode_chat(prompt.content)


def _check_ids(prompts: Sequence[TokenizedPrompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InvalidRequest(
                f"--prompts: received the id {prompt.id!r} twice. Expected each prompt of a file "
                "to have its own id."
            )
        seen.add(prompt.id)
