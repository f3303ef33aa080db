"""The one call of torch's ONNX exporter, with its failures told as ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runtime.errors import BuildError, OutriderError

from .static_attention import OPSET


def to_onnx(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    dynamic_shapes: tuple[Any, ...],
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    name: str,
) -> torch.onnx.ONNXProgram:
    """Raises BuildError, or what the module refused, naming the model `name`."""
    try:
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            dynamic_shapes=dynamic_shapes,
            input_names=list(inputs),
            output_names=list(outputs),
        )
    except Exception as error:
        raise _reason(error, name) from error
    if program is None:
        raise BuildError("torch.onnx.export returned nothing; rerun with --verbose.")
    return program


def _reason(error: Exception, model: str) -> OutriderError:
    """What stopped the exporter: a refusal from in here, which it wraps, or its own trouble."""
    last: BaseException = error
    while not isinstance(last, OutriderError) and (last.__cause__ or last.__context__):
        last = last.__cause__ or last.__context__  # type: ignore[assignment]
    if isinstance(last, OutriderError):
        return type(last)(str(last))
    text = str(last).strip() or "no message"
    return BuildError(
        f"{model}: the trace failed ({type(last).__name__}: {text.splitlines()[0]}). Expected a "
        "decoder that torch.onnx.export can follow; please report it with its config.json."
    )
