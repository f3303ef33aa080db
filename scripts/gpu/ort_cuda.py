"""The backend for ONNX Runtime's CUDA provider through the steps that hold of any, as it is used.

Once as it decodes, with the provider's graph capture, and once without: texts must be the same, and
the difference in time is what capturing gains.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from runtime.bundle import Bundle
from runtime.provider.graphs import ProviderGraphs
from runtime.provider.sessions import CUDA, Provider
from runtime.provider_contract import PROVIDER_BACKEND

from .steps import COMMON, Check, Skipped


def measure(path: Path, provider: Provider = CUDA) -> dict[str, Any]:
    """Figures of each step, by step; a step that fails ends it, with what it says."""
    backend = Bundle.load(path, verify=False).manifest.backend
    if backend != PROVIDER_BACKEND:
        raise Skipped(f"{path} was built with --backend {backend}, not {PROVIDER_BACKEND}")
    plain = replace(provider, captures=False)
    return {"captured": _steps(path, provider), "plain": _steps(path, plain)}


def _steps(path: Path, provider: Provider) -> dict[str, Any]:
    check = Check(path=path, open_with=partial(ProviderGraphs, provider=provider))
    found: dict[str, Any] = {}
    try:
        for step in COMMON:
            try:
                found[step.__name__] = step(check)
            except Skipped as reason:
                found[step.__name__] = {"skipped": str(reason)}
    finally:
        check.close()
    return found
