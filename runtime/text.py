"""Text to token ids and back, through the bundle's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import BundleError, InvalidRequest

Messages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "…"}, …]


class Text:
    """The tokenizer and, where the model has one, its chat template."""

    def __init__(
        self,
        tokenizer_path: Path,
        chat_template: str | None,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
    ) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_path))
        except Exception as error:  # tokenizers raises bare Exception
            raise BundleError(f"{tokenizer_path.name}: {error}; rebuild the bundle.") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._source = chat_template
        self._template: Any = None  # compiled on first use
        self._special = {
            "bos_token": self._token(bos_token_id),
            "eos_token": self._token(eos_token_ids[0] if eos_token_ids else None),
        }

    def encode(self, prompt: str) -> list[int]:
        """A plain prompt, with the special tokens that the tokenizer adds to one."""
        return list(self._tokenizer.encode(prompt).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode_chat(self, messages: Messages) -> list[int]:
        """Messages through the template, up to where the assistant's answer begins."""
        text = self.render(messages)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Messages) -> str:
        """The template's text; raises InvalidRequest where the template refuses the messages."""
        if self._source is None:
            raise InvalidRequest(
                "messages: this model has no chat template. Expected a text prompt or token ids."
            )
        from . import chat_template

        if self._template is None:
            self._template = chat_template.compile_template(self._source)
        return chat_template.render(self._template, messages, self._special)

    def _token(self, token_id: int | None) -> str:
        token = None if token_id is None else self._tokenizer.id_to_token(token_id)
        return token or ""
