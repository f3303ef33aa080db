"""Records as they are made, a line each: an interrupted comparison goes on where it stopped.

The first line says what the records belong to; a file of another comparison is started anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import InvalidRequest

from .records import Record

logger = logging.getLogger(__name__)

Key = tuple[str, float]  # prompt, temperature


class WorkFile:
    """Records by prompt and temperature, each on disk before the next one is measured."""

    def __init__(self, path: Path, belongs_to: Mapping[str, Any]) -> None:
        self._path = path
        header = json.dumps({"belongs_to": belongs_to}, sort_keys=True)
        self.records: dict[Key, Record] = {}
        lines = _lines(path)
        if lines[:1] == [header]:
            self._read(lines[1:])
        elif lines:
            logger.warning("%s: of another comparison; starting anew", path)
        self._write_all(header)

    def add(self, record: Record) -> None:
        self.records[record.prompt, record.temperature] = record
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_dict()) + "\n")

    def _read(self, lines: list[str]) -> None:
        for line in lines:
            try:
                record = Record.from_dict(json.loads(line))
            except (ValueError, TypeError, KeyError):
                logger.warning("%s: dropping a line that was not finished", self._path)
                continue
            self.records[record.prompt, record.temperature] = record

    def _write_all(self, header: str) -> None:
        lines = [header, *(json.dumps(r.as_dict()) for r in self.records.values())]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(
                f"--out: {error}. Expected a folder that can be written to."
            ) from error


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: {error}. Expected a work file; remove it.") from error
