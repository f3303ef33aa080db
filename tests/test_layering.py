"""The runtime is the leaf: it works where nothing that built the bundle is installed."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import runtime

BUILDERS = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf")
ABOVE = ("export", "engines", "calibration")

# Runs in a fresh process: every import of a forbidden name fails as if it were not installed.
IMPORT_WITHOUT = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (refused by the test)")

sys.meta_path.insert(0, Refuse())
for module in {modules!r}:
    importlib.import_module(module)
print(len({modules!r}))
"""


def modules_of(package: object) -> list[str]:
    name, path = package.__name__, package.__path__  # type: ignore[attr-defined]
    found = [module.name for module in pkgutil.walk_packages(path, f"{name}.")]
    return [name, *(module for module in found if not module.endswith("__main__"))]


def test_every_runtime_module_imports_without_the_builders(root: Path) -> None:
    modules = modules_of(runtime)
    code = IMPORT_WITHOUT.format(forbidden={*BUILDERS, *ABOVE}, modules=modules)
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(modules)


def test_importing_runtime_loads_no_builder(root: Path) -> None:
    code = f"import runtime, sys; print(sorted({{*{BUILDERS}, *{ABOVE}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_import_contracts_hold(root: Path) -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("package", ["export", "engines", "calibration", "runtime"])
def test_the_distribution_carries_every_package(root: Path, package: str) -> None:
    find = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert f"{package}*" in find["find"]["include"]
    folders = [path.parent for path in (root / package).rglob("*.py")]
    without = sorted(
        {str(f.relative_to(root)) for f in folders if not (f / "__init__.py").exists()}
    )
    assert without == [], "folders with modules but no __init__.py are left out of the package"
