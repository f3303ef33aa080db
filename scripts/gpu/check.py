"""Run every step of a GPU check, go on after one that fails, write a JSON and a readable report.

python -m scripts.gpu.check BUNDLE --out reports/gpu
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .steps import STEPS, Check, Skipped

MINUTES = 8.0


def main() -> int:
    arguments = _arguments()
    check = Check(
        path=arguments.bundle,
        onnx_bundle=arguments.onnx_bundle,
        large_bundle=arguments.large_bundle,
    )
    deadline = time.monotonic() + 60 * arguments.minutes
    results: dict[str, dict[str, Any]] = {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in STEPS:
        results[name] = run_step(name, check, deadline)
        say(f"{results[name]['status']:8} {results[name]['seconds']:7.1f} s  {name}")
        _write(arguments.out, arguments.bundle, results)  # after each: a crash leaves the rest
    check.close()
    say(str(arguments.out))
    return int(any(one["status"] == "failed" for one in results.values()))


def run_step(name: str, check: Check, deadline: float) -> dict[str, Any]:
    """Its status, reason, figures and seconds; never raises."""
    start = time.monotonic()
    found: dict[str, Any] = {"status": "passed", "reason": "", "figures": {}}
    if start > deadline:
        found |= {"status": "skipped", "reason": "out of time"}
    else:
        try:
            found["figures"] = STEPS[name](check)
        except Skipped as reason:
            found |= {"status": "skipped", "reason": str(reason)}
        except Exception as error:  # whatever it is, the next step may still tell something
            found |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            found["traceback"] = traceback.format_exc()
    return found | {"seconds": time.monotonic() - start}


def readable(bundle: Path, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [f"# GPU check of {bundle.name}", ""]
    for name, one in results.items():
        lines += [f"## {name}: {one['status']}", ""]
        if one["reason"]:
            lines += [str(one["reason"]), ""]
        lines += [*_lines(one["figures"]), ""]
    return "\n".join(lines)


def _lines(figures: Mapping[str, Any], indent: str = "") -> list[str]:
    found = []
    for key, value in figures.items():
        if isinstance(value, Mapping):
            found += [f"{indent}- {key}:", *_lines(value, indent + "  ")]
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            found.append(f"{indent}- {key}: {shown}")
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(out: Path, bundle: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    stem = bundle.name
    (out / f"{stem}.json").write_text(json.dumps(results, indent=1, default=str) + "\n")
    (out / f"{stem}.md").write_text(readable(bundle, results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        epilog="Before all others, --wheels DIR takes the packages from there, as scripts/gpu_pack "
        "left them. Example: scripts/gpu_check build/rtx --wheels build/wheels",
    )
    parser.add_argument("bundle", type=Path, help="a bundle that was built for a GPU")
    parser.add_argument("--out", type=Path, default=Path("reports/gpu"), help="for the reports")
    parser.add_argument("--onnx-bundle", type=Path, help="built with --backend onnxruntime-cuda")
    parser.add_argument("--large-bundle", type=Path, help="of 7 to 8 billion parameters, for times")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no step begins later")
    found = parser.parse_args()
    for path in (found.bundle, found.onnx_bundle, found.large_bundle):
        if path is not None and not (path / "manifest.json").is_file():
            parser.error(f"{path}: received no bundle. Expected what python -m export build makes.")
    return found


if __name__ == "__main__":
    sys.exit(main())
