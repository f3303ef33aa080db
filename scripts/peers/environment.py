"""The peers' own environment and their models, made once under `build/peers`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "peers"
ENGINES = {  # module: what to install
    "onnxruntime_genai": "onnxruntime-genai==0.18.0",
    "llama_cpp": "llama-cpp-python==0.3.36",  # compiled here, for this machine's instructions
}
CMAKE_ARGS = "-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF -DLLAVA_BUILD=OFF"
GGUF_TYPES = {"Q4_0": 2, "Q8_0": 7}  # llama_ftype


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Where everything lies. `venv` has the engines; `genai` and `ggufs` are their models."""

    venv: Path = FOLDER / "venv"
    genai: Path = FOLDER / "genai-int4"
    folder: Path = FOLDER

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def gguf(self, kind: str) -> Path:
        return self.folder / f"{kind}.gguf"


def prepare(peers: Peers, checkpoint: Path) -> None:
    """Install what is missing and build both peers' models from `checkpoint` (.gguf)."""
    peers.folder.mkdir(parents=True, exist_ok=True)
    if not peers.python.exists():
        _run("environment", [sys.executable, "-m", "venv", str(peers.venv)])
    for module, requirement in ENGINES.items():
        _install(peers, module, requirement)
    if not (peers.genai / "genai_config.json").exists():
        _build_genai(peers, checkpoint)
    for kind, ftype in GGUF_TYPES.items():
        if not peers.gguf(kind).exists():
            code = _QUANTIZE.format(source=str(checkpoint), out=str(peers.gguf(kind)), ftype=ftype)
            _run(f"llama.cpp {kind}", [str(peers.python), "-c", code])


_QUANTIZE = """
import llama_cpp as lib
params = lib.llama_model_quantize_default_params()
params.ftype, params.allow_requantize, params.nthread = {ftype}, True, 2
source, out = {source!r}, {out!r}
raise SystemExit(lib.llama_model_quantize(source.encode(), out.encode(), params))
"""


def _install(peers: Peers, module: str, requirement: str) -> None:
    """Install a peer whose module is not there in the wanted version."""
    code = f"import {module}; print({module}.__version__)"
    found = subprocess.run([str(peers.python), "-c", code], capture_output=True, text=True)
    if found.stdout.strip() == requirement.partition("==")[2]:
        return
    pip = [str(peers.python), "-m", "pip", "install", "--quiet"]
    title = f"install {requirement} (llama.cpp compiles for ten minutes or more)"
    source = ["--no-binary", "llama-cpp-python"]
    _run(title, [*pip, *source, requirement], {"CMAKE_ARGS": CMAKE_ARGS})


def _build_genai(peers: Peers, checkpoint: Path) -> None:
    (package,) = peers.venv.glob("lib/python*/site-packages")
    script = Path(__file__).with_name("build_genai.py")
    command = [sys.executable, str(script), str(checkpoint), str(peers.genai)]
    _run("ONNX Runtime GenAI's model builder", [*command, "--package", str(package)])


def _run(title: str, command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run with output into a log; raises SystemExit with the log's end where it fails."""
    print(f"· {title}", file=sys.stderr, flush=True)
    log = FOLDER / "prepare.log"
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(
            command, stdout=out, stderr=out, env={**os.environ, **(environment or {})}, check=False
        )
    if done.returncode:
        raise SystemExit(f"{title} failed; the end of {log}:\n{log.read_text()[-2000:]}")
