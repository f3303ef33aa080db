"""From a lowered graph on disk to a serialized engine, or to an error that says why not.

TensorRT-RTX builds for named compute capabilities on any machine; TensorRT for the GPU at hand.

The library's own API, without Polygraphy (0.53.6) in between: that keeps the one logger of a
process for itself, tells a warning once, so that an input dropped from a second graph would pass in
silence, and leaves out of its errors what the parser said. It chooses between the two libraries
when it is imported, by an environment variable, and would save a loop over profiles.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from runtime.errors import BuildError

from .package import Library
from .ranges import Profile
from .rules import BINARY_BYTES, check_casts, check_size, check_warnings
from .strong_types import meant_casts

logger = logging.getLogger(__name__)

FP8 = (ir.DataType.FLOAT8E4M3FN,)
FP4 = (ir.DataType.FLOAT4E2M1,)
# The least compute capability that multiplies in the type; below it a build can't be done.
_LEAST_CAPABILITY = {**dict.fromkeys(FP8, 89), **dict.fromkeys(FP4, 100)}


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """`compute_capabilities`: such as (80, 89); empty: every one that the library builds for, or
    the GPU at hand. `workspace_bytes`: most that a kernel may use beside activations.
    """

    compute_capabilities: tuple[int, ...] = ()
    workspace_bytes: int | None = None
    optimization_level: int | None = None  # None: the library's own


@dataclass(kw_only=True)
class TimingCache:
    """Kernel timings, kept from one graph's build to the next.

    Of TensorRT alone: TensorRT-RTX times nothing when it builds, and has the calls as no-ops.
    """

    data: bytes = b""
    _live: Any = field(default=None, repr=False)

    def attach(self, config: Any) -> None:
        self._live = config.create_timing_cache(self.data)
        config.set_timing_cache(self._live, False)

    def keep(self) -> None:
        if self._live is not None:
            self.data = bytes(memoryview(self._live.serialize()))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A serialized engine, in the library's own memory, and what it was made from."""

    data: memoryview = field(repr=False)  # bytes
    warnings: tuple[str, ...]
    weight_bytes: int


def build_plan(
    library: Library,
    path: Path,
    profiles: Sequence[Profile],
    options: BuildOptions,
    timing: TimingCache | None = None,
) -> Plan:
    """Parse and build the graph at `path`. Raises BuildError; see `rules` for what else fails."""
    model = ir.load(path)
    check_targets(library, options.compute_capabilities)
    types = {v.dtype for v in model.graph.initializers.values()}
    check_types(path.name, types, options.compute_capabilities)
    library.logger.clear()
    builder = library.api.Builder(library.logger)
    library.check_logger(builder)
    network = _parsed(library, builder, path)
    check_warnings(path.name, library.logger.warnings)
    check_casts(path.name, network, library.api, meant_casts(model))
    config = _config(library, builder, model, profiles, options)
    if library.portable_builds:
        timing = None
    if timing is not None:
        timing.attach(config)
    serialized = builder.build_serialized_network(network, config)
    warnings = tuple(library.logger.warnings)
    if serialized is None:
        raise BuildError(
            f"{path.name}: {library.backend} {library.version} refused the graph: "
            f"{'; '.join(library.logger.errors[:2]) or 'no reason given'}. Expected an engine; "
            "please report the model with its config.json and the precision."
        )
    check_warnings(path.name, warnings)
    if timing is not None:
        timing.keep()
    weight_bytes = _weight_bytes(model)
    binaries = 0 if library.portable_builds else BINARY_BYTES * len(profiles)
    data = memoryview(serialized).cast("B")
    check_size(path.name, np.frombuffer(data, np.uint8), weight_bytes, binaries)
    logger.info("%s: plan of %d bytes, weights %d", path.name, len(data), weight_bytes)
    return Plan(data=data, warnings=warnings, weight_bytes=weight_bytes)


def check_targets(library: Library, chosen: Sequence[int]) -> None:
    """Raises BuildError for compute capabilities that the library doesn't build for."""
    known = supported_capabilities(library)
    if chosen and not library.portable_builds:
        raise BuildError(
            f"--compute-capability: received {', '.join(map(str, chosen))}. Expected none: "
            f"{library.backend} builds for the GPU of this machine; use --backend tensorrt-rtx."
        )
    if unknown := [one for one in chosen if one not in known]:
        raise BuildError(
            f"--compute-capability: received {', '.join(map(str, unknown))}. Expected some of "
            f"{', '.join(map(str, known))}, which {library.backend} {library.version} builds for."
        )


def check_types(name: str, types: Iterable[ir.DataType | None], chosen: Sequence[int]) -> None:
    """Raises BuildError for a target that doesn't multiply in a type of the weights."""
    for dtype in types:
        least = _LEAST_CAPABILITY.get(dtype, 0) if dtype is not None else 0
        if low := [one for one in chosen if one < least]:
            raise BuildError(
                f"{name}: received {dtype.name if dtype else ''} weights for compute capability "
                f"{low[0]}. Expected {least} or higher, which multiplies in that type; choose "
                "another --precision, or leave that target out."
            )


def supported_capabilities(library: Library) -> tuple[int, ...]:
    """Such as 80, 89, 120; empty for a library that builds for the GPU at hand."""
    kinds = getattr(library.api, "ComputeCapability", None)
    names = kinds.__members__ if kinds is not None else {}
    return tuple(sorted(int(name[2:]) for name in names if name.startswith("SM")))


def _parsed(library: Library, builder: Any, path: Path) -> Any:
    # Strongly typed: TensorRT 11 knows nothing else, 10 asks for the flag.
    flags = 0
    kinds = getattr(library.api, "NetworkDefinitionCreationFlag", None)
    if kinds is not None and "STRONGLY_TYPED" in kinds.__members__:
        flags = 1 << int(kinds.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = library.api.OnnxParser(network, library.logger)
    if not parser.parse_from_file(str(path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise BuildError(
            f"{path.name}: {library.backend} {library.version} can't parse the graph: "
            f"{errors[0].desc() if errors else 'no reason given'}. Expected operators that it "
            "knows; please report the model with its config.json."
        )
    return network


def _config(
    library: Library,
    builder: Any,
    model: ir.Model,
    profiles: Sequence[Profile],
    options: BuildOptions,
) -> Any:
    config = builder.create_builder_config()
    for profile in profiles:
        config.add_optimization_profile(_optimization_profile(builder, model, profile))
    if options.workspace_bytes is not None:
        pool = library.api.MemoryPoolType.WORKSPACE
        config.set_memory_pool_limit(pool, options.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.compute_capabilities:
        config.num_compute_capabilities = len(options.compute_capabilities)
        for index, one in enumerate(options.compute_capabilities):
            config.set_compute_capability(getattr(library.api.ComputeCapability, f"SM{one}"), index)
    return config


def _optimization_profile(builder: Any, model: ir.Model, profile: Profile) -> Any:
    made = builder.create_optimization_profile()
    for value in model.graph.inputs:
        shapes = profile.shapes(value)
        if shapes is not None:
            made.set_shape(value.name, *shapes)
    if not made:
        raise BuildError(f"profile {profile.name}: received shapes that don't fit one another.")
    return made


def _weight_bytes(model: ir.Model) -> int:
    values = model.graph.initializers.values()
    return sum(v.const_value.nbytes for v in values if v.const_value is not None)
