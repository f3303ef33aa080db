"""Real text that every machine has: what Python's own library says of itself.

A certificate wants hundreds of prompts of real language and code, without carrying a corpus.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

MODULES = (
    "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "collections",
    "concurrent.futures", "configparser", "contextlib", "csv", "datetime", "decimal",
    "difflib", "email.message", "enum",
    "fractions", "functools", "heapq", "http.client", "inspect", "io", "itertools", "json",
    "logging", "mailbox", "multiprocessing", "os", "pathlib", "pickle", "pprint", "random", "re",
    "shutil", "socket", "sqlite3", "statistics", "string", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "timeit", "tokenize", "types", "typing", "unittest", "urllib.parse",
    "uuid", "weakref", "zipfile",
)  # fmt: skip
LEAST_CHARACTERS = 160


def library_texts() -> Iterator[str]:
    """Descriptions of public functions and classes, each once, always in the same order."""
    told: set[str] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for member in sorted(vars(module)):
            text = _described(getattr(module, member)) if not member.startswith("_") else None
            if text and text not in told:
                told.add(text)
                yield text


def _described(thing: object) -> str | None:
    if not (inspect.isfunction(thing) or inspect.isclass(thing)):
        return None
    text = inspect.getdoc(thing)
    return text if text and len(text) >= LEAST_CHARACTERS else None
