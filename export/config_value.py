"""One value of a config.json, of the type that it must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from runtime.errors import CheckpointError

T = TypeVar("T")


def config_value(raw: Mapping[str, Any], key: str, kind: type[T], where: str) -> T | None:
    """`raw[key]`, None where it is missing or null. Raises CheckpointError for another type."""
    value = raw.get(key)
    if value is not None and type(value) is not kind:  # a bool is no int here
        raise CheckpointError(
            f"{where}: received {key} {value!r}. Expected {kind.__name__} or null; mend "
            "config.json, or download it again."
        )
    return value
