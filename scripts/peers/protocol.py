"""What a worker process and the driver say to each other: one JSON object a line.

A worker imports nothing but its own engine and this file, so each runs in its own environment.
It first writes a greeting, `{"name", "version"}`; then for each request
`{"ids", "max_tokens", "num_draft_tokens"}` one answer `{"ids", "first_s", "decode_s"}`:
the new tokens, the time to the first of them, and the time from the first to the last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator


def serve(name: str, version: str, answer: Callable[[dict], Iterable[int]]) -> None:
    """Answer requests until stdin ends; `answer` yields tokens as they are made."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an engine prints must not mix with the answers
    _write(replies, {"name": name, "version": version})
    for line in sys.stdin:
        request = json.loads(line)
        _write(replies, _timed(answer(request), request["max_tokens"]))


def _timed(tokens: Iterable[int], limit: int) -> dict:
    start = time.perf_counter()
    ids, first = [], start
    for token in _first(tokens, limit):
        first = first if ids else time.perf_counter()
        ids.append(int(token))
    return {"ids": ids, "first_s": first - start, "decode_s": time.perf_counter() - first}


def _first(tokens: Iterable[int], limit: int) -> Iterator[int]:
    for count, token in enumerate(tokens, 1):
        yield token
        if count == limit:
            return


def _write(stream, value: dict) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()
