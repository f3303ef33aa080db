"""What every test runs under: no network, two threads, and markers that say why they skip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime import Decoder

# Before anything imports an engine: both read these once, when they are loaded.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "2")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# The same examples each time, so that a change alone can fail; `scripts/test --all` looks further.
settings.register_profile("steady", derandomize=True)
settings.register_profile("search", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NO_MODEL = (
    "the example model is not in build/models; run `python scripts/fetch_model.py build/models`, "
    "or name it in OUTRIDER_EXAMPLE_GGUF"
)
NO_DEVICE = "no CUDA device with its driver here; scripts/gpu_check runs all on one that has"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine can't run, with the reason and the way to mend it."""
    missing = {
        "model": None if example_path() else pytest.mark.skip(reason=NO_MODEL),
        "gpu": None if has_cuda() else pytest.mark.skip(reason=NO_DEVICE),
    }
    for item in items:
        for marker, skip in missing.items():
            if skip and item.get_closest_marker(marker):
                item.add_marker(skip)


def example_path() -> Path | None:
    named = os.environ.get("OUTRIDER_EXAMPLE_GGUF")
    path = Path(named) if named else ROOT / "build" / "models" / EXAMPLE_NAME
    return path if path.is_file() else None


@pytest.fixture(scope="session", autouse=True)
def kernels_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels aren't left in this user's home."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OUTRIDER_KERNELS", str(tmp_path_factory.mktemp("kernels")))
        yield


def has_cuda() -> bool:
    from runtime.cuda.driver import Driver
    from runtime.errors import EngineError

    try:
        Driver().gpu()
    except EngineError:
        return False
    return True


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def example_gguf() -> Path:
    """The example model; tests that use it carry the marker `model`."""
    path = example_path()
    if path is None:
        pytest.skip(NO_MODEL)
    return path


# Tiny checkpoints and bundles, made once a session; the imports are heavy and stay inside.


@pytest.fixture(scope="session")
def kept_traces() -> Iterator[None]:
    """Builds trace a configuration once a session."""
    from helpers_build import keep_traces

    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_traces(monkeypatch)
        yield


@pytest.fixture(scope="session")
def build_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(scope="session")
def tiny_target(build_root: Path) -> Path:
    """A tied Llama of two layers, f32."""
    from helpers_build import save_target

    return save_target(build_root / "target")


@pytest.fixture(scope="session")
def tiny_draft(build_root: Path) -> Path:
    """Its draft: one layer, some of the tokens, the target's embedding, fewer positions."""
    from helpers_build import save_distilled

    return save_distilled(build_root / "draft")


@pytest.fixture(scope="session")
def own_draft_bundle(kept_traces: None, build_root: Path, tiny_target: Path) -> Path:
    """fp32, the target as its own draft."""
    from helpers_build import build_bundle

    return build_bundle(build_root / "own-draft", tiny_target, tiny_target, "fp32")


@pytest.fixture(scope="session")
def own_trees_bundle(kept_traces: None, build_root: Path, tiny_target: Path) -> Path:
    """The same, with trees."""
    from helpers_build import K

    from export.build import BuildRequest, build

    return build(
        BuildRequest(
            target=str(tiny_target),
            draft=str(tiny_target),
            out=build_root / "own-trees",
            precision="fp32",
            max_context=96,
            max_draft_tokens=K,
            max_tree_nodes=24,
        )
    )


@pytest.fixture(scope="session")
def fp32_bundle(kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path) -> Path:
    from helpers_build import build_bundle

    return build_bundle(build_root / "fp32", tiny_target, tiny_draft, "fp32")


@pytest.fixture(scope="session")
def int4_bundle(kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path) -> Path:
    from helpers_build import build_bundle

    return build_bundle(build_root / "int4", tiny_target, tiny_draft, "int4")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """A draft near its target, whose end token is always likely."""
    from helpers_decode import NEAR, TABLE
    from helpers_runtime import write_bundle

    from runtime import Decoder

    path = tmp_path_factory.mktemp("near") / "bundle"
    with Decoder.load(write_bundle(path, TABLE, NEAR), threads=1) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """A draft that is its target."""
    from helpers_decode import TABLE
    from helpers_runtime import write_bundle

    from runtime import Decoder

    path = tmp_path_factory.mktemp("twin") / "bundle"
    with Decoder.load(write_bundle(path, TABLE, TABLE), threads=1) as decoder:
        yield decoder
