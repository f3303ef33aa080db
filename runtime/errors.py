"""Every error that Outrider raises on purpose, as one tree.

    OutriderError
    ├── InvalidRequest        a prompt, a sampling value or a limit of one request
    │   └── LimitExceeded     more than the bundle was built for; names the limit and the flag
    ├── BundleError           a directory that is not a sound bundle, or not for this machine
    ├── CheckpointError       a checkpoint that is missing, truncated, foreign or inconsistent
    │   ├── UnsupportedModel  a model type or feature that the lowering does not carry
    │   └── VocabularyMismatch  target and draft do not speak the same tokens
    ├── BuildError            a trace, a pass, a quantization or an engine build failed
    │   ├── GateFailed        the built graphs do not agree with what they were built from
    │   └── DraftDoesNotPay   measured: plain decoding is faster; exit status 2
    └── EngineError           an engine refused a tensor or failed while running

A message says what was received, what was expected and how to mend it.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Root of all errors raised on purpose."""

    exit_status = 1  # of a command line that ends with it


class InvalidRequest(OutriderError, ValueError):
    """A request that cannot be served as it stands; other requests go on."""


class LimitExceeded(InvalidRequest):
    """A request beyond what the bundle was built for."""

    def __init__(self, what: str, received: int, limit: int, flag: str) -> None:
        super().__init__(
            f"{what}: received {received}. Expected at most {limit}, the limit of this bundle; "
            f"shorten the request or rebuild with {flag} {received} or more."
        )


class BundleError(OutriderError):
    """A bundle that is missing, damaged, of another schema or not for this machine."""


class CheckpointError(OutriderError):
    """A checkpoint that is missing, truncated, foreign or inconsistent."""


class UnsupportedModel(CheckpointError):
    """A model type or feature that the lowering does not carry."""


class VocabularyMismatch(CheckpointError):
    """Target and draft do not share one vocabulary."""


class BuildError(OutriderError):
    """A trace, a pass, a quantization or an engine build failed."""


class GateFailed(BuildError):
    """The built graphs disagree with what they were built from."""


class DraftDoesNotPay(BuildError):
    """Nothing failed: the draft that was asked for is measured to be slower than plain decoding."""

    exit_status = 2


class EngineError(OutriderError):
    """An engine refused a tensor or failed while running."""
