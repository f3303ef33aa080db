"""The reference of a comparison: a bundle as it is, or a checkpoint built to fp32 for this.

What builds bundles lies above this package, so a checkpoint is built by a process of its own; the
result is kept in a cache folder and taken again for the same files.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.bundle import Bundle
from runtime.errors import BuildError, BundleError

from .drafting import ComparedDraft

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where a reference is built from: target and draft as `python -m export build` takes them;
    draft None: none, where the bundle's own couldn't be compared."""

    target: str
    draft: str | None
    cache: Path


def load_reference(bundle: Bundle, reference: Checkpoints, tell: Callable[[str], None]) -> Bundle:
    """The bundle at `reference.target`, or one built from it. Raises BundleError or BuildError."""
    if (Path(reference.target) / "manifest.json").exists():
        return Bundle.load(reference.target)
    if reference.draft is None and isinstance(bundle.manifest.draft, ComparedDraft):
        raise BundleError(
            f"--reference {reference.target}: received a checkpoint, or nothing. Expected a "
            "bundle, or a checkpoint together with --reference-draft, the draft to build it with."
        )
    out = reference.cache / _name(bundle, reference)
    if out.exists() and (kept := _kept(out)) is not None:
        tell(f"reference: taking {out}, built before")
        return kept
    tell(f"reference: building {reference.target} to fp32 in {out}, a few minutes")
    _build(bundle, reference, out)
    return Bundle.load(out)


def _kept(out: Path) -> Bundle | None:
    """A bundle of the cache, unless another version made it."""
    try:
        return Bundle.load(out)
    except BundleError as error:
        logger.info("%s: building anew: %s", out, error)
        shutil.rmtree(out)
        return None


def _build(bundle: Bundle, reference: Checkpoints, out: Path) -> None:
    limits = bundle.manifest.limits
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "export", "build", "--precision", "fp32"]
    command += ["--target", reference.target, "--out", str(out)]
    command += ["--draft", reference.draft or "none"]
    command += ["--max-context", str(limits.max_context), "-k", str(limits.max_draft_tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(
            f"--reference {reference.target}: its build failed: {last} Expected a checkpoint that "
            f"builds; try it by itself: {' '.join(command[1:])}"
        )


def _name(bundle: Bundle, reference: Checkpoints) -> str:
    """Another name for other files: sizes and times of change stand for their contents."""
    limits = bundle.manifest.limits
    parts = [str(limits.max_context), str(limits.max_draft_tokens)]
    for source in (reference.target, str(reference.draft)):
        path = Path(source)
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
        parts += [source, *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return f"{Path(reference.target).name}-fp32-{digest}"
