"""What turns text into tokens and back, as the bundle carries it.

Three files: `tokenizer.json` (without truncation and padding, which the runtime must not meet),
`chat_template.jinja` where the model has one, and `generation_config.json` with the end tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runtime.errors import CheckpointError

from .model_config import read_json
from .special_tokens import SpecialTokens


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    tokenizer: Tokenizer
    chat_template: str | None
    generation_config: dict[str, Any]

    def save(self, directory: Path, tokens: SpecialTokens) -> None:
        """Write the files; `tokens` overrides what the generation config says of them."""
        directory.mkdir(parents=True, exist_ok=True)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.save(str(directory / "tokenizer.json"))
        if self.chat_template is not None:
            template = directory / "chat_template.jinja"
            template.write_text(self.chat_template, encoding="utf-8", newline="")
        generation = self.generation_config | {
            "bos_token_id": tokens.bos_token_id,
            "eos_token_id": list(tokens.eos_token_ids),
        }
        text = json.dumps(generation, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        (directory / "generation_config.json").write_text(text, encoding="utf-8")


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory.

    `tokenizer.json` is taken as it stands; older files are converted by transformers. Raises
    CheckpointError where there is none.
    """
    path = directory / "tokenizer.json"
    try:
        if path.exists():
            return Tokenizer.from_file(str(path))
        return _convert_tokenizer(directory)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(
            f"{directory}: received no readable tokenizer ({str(error).splitlines()[0]}). Expected "
            "tokenizer.json; save the model's tokenizer into the directory."
        ) from error


def _convert_tokenizer(directory: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    if not any((directory / name).exists() for name in ("tokenizer.model", "vocab.json")):
        raise FileNotFoundError("no tokenizer.json, tokenizer.model or vocab.json")
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())


def read_chat_template(directory: Path) -> str | None:
    """From `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`, in that order.

    Of several named templates the one called `default` is taken.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_optional_json(directory / name).get("chat_template")
        if isinstance(template, list):
            template = {t["name"]: t["template"] for t in template}.get("default")
        if template is not None:
            return str(template)
    return None


def read_optional_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is missing. Raises CheckpointError if it is broken."""
    return read_json(path) if path.exists() else {}
