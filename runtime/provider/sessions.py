"""Opens sessions on one execution provider, or says why that can't be; nothing runs elsewhere.

ONNX Runtime goes on without a provider that doesn't load, and leaves to the CPU what a provider has
no kernel for, in silence. Neither happens here: the provider is asked for by name, fallback is off,
and what a session has got is looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EngineError
from ..provider_contract import PROVIDER_BACKEND

if TYPE_CHECKING:
    import onnxruntime

_INSTALL = (
    "uninstall onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]' on a machine with an "
    "NVIDIA GPU, or build with --backend onnxruntime for this one"
)


@dataclass(frozen=True, kw_only=True)
class Provider:
    """Where sessions run, and where their memory is.

    captures: whether it repeats a call as one graph of its own (CUDA's `enable_cuda_graph`).
    """

    name: str
    device: str
    index: int = 0
    captures: bool


CUDA = Provider(name="CUDAExecutionProvider", device="cuda", captures=True)
#: The same code where there is no GPU: for rehearsals and tests.
HOST = Provider(name="CPUExecutionProvider", device="cpu", captures=False)


def check_provider(provider: Provider) -> None:
    """Raises EngineError where it isn't installed, doesn't load, or finds no device."""
    import onnxruntime as ort

    available = ort.get_available_providers()
    if provider.name not in available:
        raise EngineError(
            f"{PROVIDER_BACKEND}: received onnxruntime {ort.__version__} with "
            f"{', '.join(available)}. Expected {provider.name}; {_INSTALL}."
        )
    if provider.device != "cuda":
        return
    _load_library(Path(ort.__file__).parent / "capi")
    try:
        ort.OrtValue.ortvalue_from_shape_and_type([1], np.uint8, provider.device, provider.index)
    except Exception as error:  # whatever CUDA says of a missing driver or device
        raise EngineError(
            f"{PROVIDER_BACKEND}: received no device {provider.index}: {error}. Expected an NVIDIA "
            f"GPU with its driver; {_INSTALL}."
        ) from error


def _load_library(capi: Path) -> None:
    """Only the log would say what is missing. Libraries that pip installed are loaded first."""
    import onnxruntime as ort

    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it doesn't find
        ort.preload_dlls()
    library = capi / "libonnxruntime_providers_cuda.so"
    if not library.exists():  # not on Linux: the session has the last word
        return
    try:
        ctypes.CDLL(str(capi / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    except OSError as error:
        raise EngineError(
            f"{PROVIDER_BACKEND}: received a CUDA provider that doesn't load ({error}). Expected "
            f"CUDA, cuDNN and an NVIDIA driver; {_INSTALL}."
        ) from error


def open_session(
    provider: Provider, path: Path, sizes: Mapping[str, int], *, captured: bool
) -> onnxruntime.InferenceSession:
    """The graph at `path`, every node of it on the provider.

    sizes: of symbolic axes that hold for every call; where all are given, nothing computes with a
    shape. captured: a call may be captured. Raises EngineError.
    """
    import onnxruntime as ort

    settings = {"device_id": str(provider.index), "enable_cuda_graph": str(int(captured))}
    given = settings if provider.device == "cuda" else {}
    try:
        session = ort.InferenceSession(
            path, _options(provider, sizes), providers=[(provider.name, given)], enable_fallback=0
        )
    except Exception as error:  # ONNX Runtime raises a dozen unrelated types
        raise EngineError(
            f"{path.name}: {provider.name} refused the graph: {error}. Expected a kernel for every "
            "node: nothing is left to the CPU; rebuild the bundle with this version, and please "
            "report the model with its config.json."
        ) from error
    found = session.get_providers()
    if found[0] != provider.name:
        raise EngineError(
            f"{path.name}: received a session on {', '.join(found)}. Expected {provider.name} "
            f"first; {_INSTALL}."
        )
    return session


def _options(provider: Provider, sizes: Mapping[str, int]) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it would log comes as an exception, and is raised
    options.intra_op_num_threads = 1  # the host only enqueues
    options.inter_op_num_threads = 1
    if provider.device != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    for axis, size in sizes.items():
        options.add_free_dimension_override_by_name(axis, size)
    return options
