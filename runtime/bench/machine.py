"""What a figure was measured on: without it, no figure means anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("outrider", "onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers")
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")


def describe_machine(threads: int | None) -> dict[str, Any]:
    """Hardware, load, versions and commit, ready for JSON."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_field("model name") or platform.processor() or platform.machine(),
        "cpu_features": [f for f in CPU_FEATURES if f in (_cpu_field("flags") or "").split()],
        "cores": cores,
        "threads": threads if threads is not None else cores,
        "load_average_before": round(os.getloadavg()[0], 2),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": _commit(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_field(name: str) -> str | None:
    """A field of the first processor, where the system has /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(values, None)


def _commit() -> str | None:
    """The checkout that this package runs from; `+` where it has changes. None where it is none."""
    if not _git("ls-files", "."):  # installed somewhere inside another project's checkout
        return None
    revision = _git("rev-parse", "--short=12", "HEAD")
    if not revision:
        return None
    return revision + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
