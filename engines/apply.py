"""Passes over a model one after the other, whoever's they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import onnx_ir as ir

from runtime.errors import BuildError, OutriderError

logger = logging.getLogger(__name__)


def apply_passes(model: ir.Model, passes: Sequence[ir.passes.PassBase]) -> ir.Model:
    """In place, in order. Raises BuildError naming the pass, whatever went wrong in it."""
    for step in passes:
        name = type(step).__name__
        try:
            result = step(model)
        except OutriderError:
            raise
        except Exception as error:  # a pass may fail in any way on a graph that it didn't expect
            cause = error.__cause__ or error
            raise BuildError(
                f"lowering pass {name}: {cause}. Expected a portable graph that it can rewrite; "
                "please report the model with its config.json."
            ) from error
        logger.info("%s: %s", name, "changed" if result.modified else "no change")
    return model
