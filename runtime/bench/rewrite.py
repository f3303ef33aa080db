"""Prompts that ask to rewrite a function with one change: answers that mostly copy the prompt.

The functions are those of this Python's own library, so nothing is carried along, and another
version of Python may give others.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, ModuleType

MODULES = (
    "argparse", "ast", "calendar", "colorsys", "copy", "difflib", "functools", "gettext", "glob",
    "heapq", "inspect", "ipaddress", "locale", "pprint", "random", "shlex", "shutil", "statistics",
    "tarfile", "textwrap", "traceback", "warnings", "zipfile",
)  # fmt: skip
LINES = range(8, 25)
MOST_CHARACTERS = 1100
LEAST_USES = 3  # of the parameter that is renamed


def rewrite_requests() -> Iterator[tuple[str, str]]:
    """Name and text, for one function of each module that has a fitting one."""
    for name in MODULES:
        module = importlib.import_module(name)
        requests = (request for function in _functions(module) if (request := _request(function)))
        yield from islice(requests, 1)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for _, member in sorted(vars(module).items()):
        if inspect.isfunction(member) and member.__module__ == module.__name__:
            yield member


def _request(function: FunctionType) -> tuple[str, str] | None:
    source = _source(function)
    fits = source.startswith("def ") and source.count("\n") in LINES
    old = _renamed(source) if fits and len(source) <= MOST_CHARACTERS else None
    if old is None:
        return None
    text = (
        f"Rewrite this Python code with one change: rename `{old}` to `new_{old}`. "
        f"Change nothing else.\n\n```python\n{source}```"
    )
    return f"{function.__module__}.{function.__name__}", text


def _source(function: FunctionType) -> str:
    """Empty where there is none: some functions are made as the library is loaded."""
    try:
        return inspect.getsource(function)
    except OSError:
        return ""


def _renamed(source: str) -> str | None:
    """The parameter that is used most, where it's used often enough."""
    function = ast.parse(source).body[0]
    uses = Counter(node.id for node in ast.walk(function) if isinstance(node, ast.Name))
    names = [node.arg for node in ast.walk(function) if isinstance(node, ast.arg)]
    most = max(names, key=lambda name: uses[name], default="")
    return most if uses[most] >= LEAST_USES else None
