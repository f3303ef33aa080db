"""Checkpoints by hub id: the snapshot on disk, downloaded first where that is allowed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import CheckpointError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


def download(source: str, revision: str | None, *, patterns: Sequence[str] = _WANTED) -> Path:
    """The snapshot's directory, named after its commit; HF_HUB_OFFLINE reads the cache alone.

    Raises CheckpointError for what is neither a path nor a hub id, and for a failed download.
    """
    if not _HUB_ID.fullmatch(source) or source.startswith("."):
        raise CheckpointError(
            f"{source}: received no such directory. Expected a Hugging Face directory, a hub id "
            "(owner/name) or a .gguf file."
        )
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            source, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors or ValueErrors
        raise CheckpointError(
            f"{source}: received no snapshot from the hub or its cache "
            f"({(str(error).strip() or type(error).__name__).splitlines()[0]}). Expected a hub id "
            "that can be read; check the name, the network and HF_HUB_OFFLINE."
        ) from error
    return Path(path)
