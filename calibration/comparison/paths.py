"""Texts that an earlier comparison stored: the same ones can be read through other bundles.

So recipes are compared on one text, its writing is paid for once, and a comparison with the two
bundles exchanged differs in nothing but signs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runtime.errors import InvalidRequest

from ..prompts import TokenizedPrompt

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Text by prompt tokens and temperature; empty where the reference is to write it."""

    texts: Mapping[tuple[Tokens, float], Tokens] = field(default_factory=dict)
    digest: str = ""
    path_tokens: int | None = None

    @classmethod
    def read(cls, path: Path) -> Paths:
        """From a comparison's compare.json. Raises InvalidRequest."""
        try:
            content = path.read_bytes()
            raw = json.loads(content)
            texts = {
                (tuple(prompt["tokens"]), float(temperature)): tuple(tokens)
                for prompt in raw["prompts"]
                for temperature, tokens in prompt["paths"].items()
            }
            length = int(raw["settings"]["path_tokens"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"--paths {path}: {error!r}. Expected the compare.json of an earlier comparison."
            ) from error
        digest = hashlib.sha256(content).hexdigest()
        return cls(texts=texts, digest=digest, path_tokens=length)

    def of(self, prompt: TokenizedPrompt, temperature: float) -> Tokens | None:
        """None lets the reference write; raises InvalidRequest where the file lacks the text."""
        if not self.digest:
            return None
        text = self.texts.get((prompt.tokens, temperature))
        if not text:
            raise InvalidRequest(
                f"--paths: received no text of prompt {prompt.id} at temperature {temperature}. "
                "Expected the same prompts and temperatures as in the comparison that wrote it."
            )
        return text


def check_lengths(paths: Paths, path_tokens: int) -> None:
    """Texts of another length would be cut or overflow caches. Raises InvalidRequest."""
    if paths.path_tokens is not None and paths.path_tokens != path_tokens:
        raise InvalidRequest(
            f"--tokens: received texts of {path_tokens} tokens, where --paths has texts of up to "
            f"{paths.path_tokens}. Expected the same --tokens and --temperatures."
        )
