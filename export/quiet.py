"""Libraries that talk about their internals while a graph is made: nothing a user can act on."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

_NOISY = ("torch.onnx", "onnx_ir", "torch.export", "onnxscript")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter's own messages concern its internals, not the user's model."""
    noisy = [logging.getLogger(name) for name in _NOISY]
    levels = [log.level for log in noisy]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for log in noisy:
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for log, level in zip(noisy, levels, strict=True):
                log.setLevel(level)
