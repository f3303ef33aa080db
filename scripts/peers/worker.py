"""The driver's side of a worker process."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class System:
    """One row of the table: a worker script, its Python, the model and the draft length."""

    name: str
    script: str
    python: Path
    model: Path
    num_draft_tokens: int | None = 0


class Worker:
    """A started worker; requests go one at a time."""

    def __init__(self, system: System, threads: int) -> None:
        self.system = system
        command = [str(system.python), str(HERE / system.script), str(system.model), str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.greeting = self._read()

    def ask(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        request = {
            "ids": ids,
            "max_tokens": max_tokens,
            "num_draft_tokens": self.system.num_draft_tokens,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.system.name}: its worker ended; run it by hand to see why")
        return json.loads(line)
