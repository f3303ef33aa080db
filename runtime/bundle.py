"""A bundle on disk: everything about it is checked before an engine sees any of it.

The manifest lists every file of the bundle with its size and digest, but for itself and for
`reports/`: those hold measurements that later runs may add or replace, and nothing in them changes
what is generated. No path and no link leads out of the directory.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .bundle_files import MANIFEST, PARTIAL, check_files, verify_digests
from .errors import BundleError
from .layer_runs import as_text
from .manifest import (
    DRAFT_TOKENIZER,
    ENGINE_LIBRARIES,
    LayerSkipDraft,
    Manifest,
    ModelCard,
    ModelDraft,
)
from .provider_contract import PROVIDER_BACKEND, PROVIDER_VERSION

GraphName = Literal["target", "draft", "fuse", "heads", "tail", "accept"]
Int64Array = np.ndarray[Any, np.dtype[np.int64]]

BACKENDS = ("onnxruntime", PROVIDER_BACKEND, *ENGINE_LIBRARIES)
_ENGINES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml")
_REQUIRED = ("tokenizer.json", "generation_config.json")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A sound bundle. Its files are read-only from here on."""

    path: Path
    manifest: Manifest
    latency: dict[str, Any] | None  # reports/latency.json
    chat_template: str | None
    generation_config: dict[str, Any]
    d2t: Int64Array | None  # [D]: target id = i + d2t[i]

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    def model_path(self, graph: GraphName) -> Path:
        return self.path / "onnx" / f"{graph}.onnx"

    @classmethod
    def load(cls, path: str | Path, *, verify: bool = True) -> Bundle:
        """Check a bundle and read its small files.

        verify: compare every file's digest, not only its size. Raises BundleError.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        check_files(path, manifest.files)
        _check_contents(manifest)
        _check_backend(manifest)
        if verify:
            verify_digests(path, manifest.files)
        return cls.described(path, manifest)

    @classmethod
    def described(cls, path: Path, manifest: Manifest) -> Bundle:
        """Read the small files of what `manifest` describes, without checking anything else.

        For a bundle that is being built, and has no manifest on disk yet. Raises BundleError.
        """
        return cls(
            path=path,
            manifest=manifest,
            latency=_read_latency(path),
            chat_template=_read_template(path, manifest),
            generation_config=_read_object(path, "generation_config.json"),
            d2t=_read_map(path, manifest),
        )


def _read_manifest(path: Path) -> Manifest:
    if not path.is_dir():
        raise BundleError(
            f"{path}: received {'a file' if path.exists() else 'no such directory'}. Expected a "
            "bundle directory; make one with `python -m export build`."
        )
    manifest = path / MANIFEST
    name = path.resolve().name
    unfinished = name.startswith(".") and PARTIAL in name
    if unfinished or manifest.is_symlink() or not manifest.is_file():
        raise BundleError(
            f"{path}: received an unfinished build, or no {MANIFEST}. Expected a finished "
            "bundle; if a build of it was interrupted, build it again."
        )
    try:
        return Manifest.from_json(manifest.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, OSError) as error:
        raise BundleError(f"{manifest}: {error}; rebuild the bundle.") from error


def _check_contents(manifest: Manifest) -> None:
    required = [*_REQUIRED, *_graph_files(manifest)]
    if isinstance(manifest.draft, LayerSkipDraft):
        _check_skipped(manifest.draft, manifest.target.cache.layers)
    required += [DRAFT_TOKENIZER] if manifest.retokenized else []
    missing = [name for name in required if name not in manifest.files]
    if missing:
        raise BundleError(f"bundle: files missing: {missing}; rebuild the bundle.")
    digest = manifest.files["tokenizer.json"].sha256
    if digest != manifest.tokenizer_sha256:
        raise BundleError(
            f"tokenizer.json: received digest {digest}. Expected {manifest.tokenizer_sha256}, the "
            "tokenizer that the models were built for; rebuild the bundle."
        )
    _check_caches(manifest)


def _graph_files(manifest: Manifest) -> list[str]:
    """A plan or an ONNX graph for each of the target, accept and what drafts."""
    graphs = manifest.draft.graphs if manifest.draft else ()
    if manifest.draft and manifest.limits.max_tree_nodes:
        graphs = (*graphs, *(manifest.draft.tree_graphs or ()))
    engines = manifest.engines
    if manifest.backend == PROVIDER_BACKEND and isinstance(manifest.draft, ModelDraft):
        graphs = (*graphs, "tail")  # a draft step is two graphs there
    if engines is None:
        return [f"onnx/{name}.onnx" for name in ("target", "accept", *graphs)]
    own = engines.draft_backend == engines.package
    drafts = [f"engines/{name}.plan" if own else f"onnx/{name}.onnx" for name in graphs]
    return ["engines/target.plan", "engines/accept.plan", *drafts]


def _check_skipped(draft: LayerSkipDraft, layers: int) -> None:
    if draft.skipped_layers[-1] >= layers:
        raise BundleError(
            f"manifest.json: draft.skipped_layers: received {as_text(draft.skipped_layers)}. "
            f"Expected some of the target's {layers} layers, counted from 0; rebuild the bundle."
        )


def _check_caches(manifest: Manifest) -> None:
    """The target's cache holds the context; a draft's may be shorter, but hold a round."""
    limits, draft = manifest.limits, manifest.draft_model
    _check_rows(manifest.target, limits.max_context, limits.max_context)
    if draft is not None:
        _check_rows(draft, min(2 * limits.max_draft_tokens, limits.max_context), limits.max_context)


def _check_rows(card: ModelCard, least: int, most: int) -> None:
    if not least <= card.cache.max_context <= most:
        expected = f"max_context {most}" if least == most else f"{least} to {most}"
        raise BundleError(
            f"manifest.json: {card.name}: received a cache of {card.cache.max_context} rows. "
            f"Expected {expected}; rebuild the bundle."
        )


def _check_backend(manifest: Manifest) -> None:
    if manifest.backend not in BACKENDS:
        raise BundleError(
            f"manifest.json: received backend {manifest.backend!r}. Expected one of "
            f"{', '.join(BACKENDS)}; rebuild with --backend, or install a newer version."
        )
    card = manifest.engines
    if (manifest.backend if manifest.backend in ENGINE_LIBRARIES else None) != (
        card.package if card else None
    ):
        raise BundleError(
            f"manifest.json: engines: received {card and card.package!r} with backend "
            f"{manifest.backend!r}. Expected the same library; rebuild the bundle."
        )
    built, installed = manifest.versions.get("onnxruntime"), _installed_version()
    if manifest.backend == PROVIDER_BACKEND:
        built = PROVIDER_VERSION  # the GPU's package may be older than what built the bundle
    if built is not None and installed is not None and _minor(installed) < _minor(built):
        raise BundleError(
            f"onnxruntime: received version {installed}. Expected {built} or newer, which this "
            "bundle is for; upgrade onnxruntime, or rebuild the bundle with this version."
        )


def _installed_version() -> str | None:
    for name in _ENGINES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise BundleError(f"manifest.json: received version {version!r}. Expected digits and dots.")
    return int(match[1]), int(match[2])


def _read_latency(path: Path) -> dict[str, Any] | None:
    name = "reports/latency.json"
    return _read_object(path, name) if (path / name).exists() else None


def _read_template(path: Path, manifest: Manifest) -> str | None:
    name = "chat_template.jinja"
    return (path / name).read_text(encoding="utf-8") if name in manifest.files else None


def _read_object(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((path / name).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BundleError(f"{name}: received no JSON ({error}); rebuild the bundle.") from error
    if not isinstance(value, dict):
        raise BundleError(f"{name}: received {type(value).__name__}. Expected a JSON object.")
    return value


def _read_map(path: Path, manifest: Manifest) -> Int64Array | None:
    if "d2t.npy" not in manifest.files:
        return None
    try:
        d2t: Int64Array = np.load(path / "d2t.npy", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise BundleError(f"d2t.npy: {error}; rebuild the bundle.") from error
    size = manifest.draft.vocab_size if manifest.draft else None
    _check_map(d2t, size or 0, manifest.target.vocab_size)
    return d2t


def _check_map(d2t: Any, size: int, target_size: int) -> None:
    fits = isinstance(d2t, np.ndarray) and d2t.dtype == np.int64 and d2t.shape == (size,)
    if not fits:
        raise BundleError(
            f"d2t.npy: received {getattr(d2t, 'dtype', '?')} {getattr(d2t, 'shape', '?')}. "
            f"Expected int64 [{size}], one entry for each draft token; rebuild the bundle."
        )
    ids = np.arange(size) + d2t
    if size and (ids.min() < 0 or ids.max() >= target_size or (np.diff(ids) <= 0).any()):
        raise BundleError(
            f"d2t.npy: received ids from {ids.min()} to {ids.max()}. Expected ascending ids below "
            f"{target_size}; rebuild the bundle."
        )
