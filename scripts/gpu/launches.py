"""How many CUDA graphs a stretch of work launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Launches:
    count: int = 0


@contextmanager
def counted(device: Any) -> Iterator[Launches]:
    """device: None on the CPU, which launches none."""
    found = Launches()
    if device is None:
        yield found
        return
    driver, real = device.driver, device.driver.call

    def call(name: str, *arguments: Any) -> Any:
        found.count += name == "cudaGraphLaunch"
        return real(name, *arguments)

    driver.call = call
    try:
        yield found
    finally:
        del driver.call
