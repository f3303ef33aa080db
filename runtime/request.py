"""The door: what a request may ask of a bundle, checked before an engine is touched."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from .errors import InvalidRequest, LimitExceeded
from .grammar_compiler import GrammarCompiler
from .manifest import Manifest
from .matcher import Matcher
from .sampling import SamplingParams
from .text import Text
from .tree_shape import TreeShape

#: plain text, token ids, or chat messages for the model's own template
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request: token ids within the vocabulary and the context, and a definite seed."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    num_draft_tokens: int | None
    tree: TreeShape | None = None  # drafted each round, in place of a chain
    matcher: Matcher | None = None  # of params.grammar, for this request alone

    @classmethod
    def admit(
        cls,
        prompt: Prompt,
        params: SamplingParams,
        num_draft_tokens: int | None,
        manifest: Manifest,
        text: Text,
        compiler: GrammarCompiler,
        tree: TreeShape | None = None,
    ) -> Request:
        """Raises InvalidRequest or LimitExceeded, naming the field and how to mend it."""
        _check_draft_tokens(num_draft_tokens, manifest)
        _check_tree(tree, num_draft_tokens, manifest)
        tokens = _tokens(prompt, text)
        _check_tokens(tokens, manifest)
        _check_ids("logit_bias", params.logit_bias, manifest)
        _check_ids("banned_tokens", params.banned_tokens, manifest)
        return cls(
            prompt=tuple(tokens),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            num_draft_tokens=num_draft_tokens,
            tree=tree,
            matcher=None if params.grammar is None else compiler.compile(params.grammar),
        )


def _tokens(prompt: Prompt, text: Text) -> list[int]:
    if isinstance(prompt, str):
        return text.encode(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(
            f"prompt: received {type(prompt).__name__}. Expected text, token ids or messages."
        )
    if any(isinstance(item, Mapping) for item in prompt):
        return text.encode_chat(prompt)  # type: ignore[arg-type]
    return [_integer(i, token) for i, token in enumerate(prompt)]


def _integer(i: int, token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, SupportsIndex):  # NumPy's have an index
        raise InvalidRequest(f"prompt: token {i}: received {token!r}. Expected an integer.")
    return token.__index__()


def _check_tokens(tokens: list[int], manifest: Manifest) -> None:
    if not tokens:
        raise InvalidRequest("prompt: received no tokens. Expected at least one.")
    vocab = manifest.target.vocab_size
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise InvalidRequest(
                f"prompt: token {i}: received {token}. Expected an id from 0 to {vocab - 1}."
            )
    limit = manifest.limits.max_context
    if len(tokens) >= limit:
        what = "prompt tokens, with room for one more"
        raise LimitExceeded(what, len(tokens) + 1, limit, "--max-context")


def _check_ids(field: str, ids: Iterable[int], manifest: Manifest) -> None:
    vocab = manifest.target.vocab_size
    unknown = [token for token in ids if token >= vocab]
    if unknown:
        raise InvalidRequest(
            f"{field}: received token {unknown[0]}. Expected ids from 0 to {vocab - 1}, the "
            "vocabulary of this bundle."
        )


def _check_tree(tree: TreeShape | None, k: int | None, manifest: Manifest) -> None:
    if tree is None:
        return
    if k is not None:
        raise InvalidRequest(
            f"tree: received {tree} with num_draft_tokens {k}. Expected one of them."
        )
    limits = manifest.limits
    if manifest.draft is None or manifest.draft.tree_graphs is None:
        drafter = manifest.draft.name if manifest.draft else "none"
        raise InvalidRequest(
            f"tree: received {tree}. Expected no tree: this bundle's drafter, {drafter}, makes "
            "chains only; give num_draft_tokens."
        )
    if tree.nodes > limits.max_tree_nodes:
        raise LimitExceeded("tree nodes", tree.nodes, limits.max_tree_nodes, "--max-tree-nodes")
    if tree.depth > limits.max_draft_tokens:
        raise LimitExceeded("levels of a tree", tree.depth, limits.max_draft_tokens, "-k")


def _check_draft_tokens(k: int | None, manifest: Manifest) -> None:
    if k is None:
        return
    if not isinstance(k, int) or isinstance(k, bool) or k < 0:
        raise InvalidRequest(
            f"num_draft_tokens: received {k!r}. Expected an integer of at least 0, or None."
        )
    if k and manifest.draft is None:
        raise InvalidRequest(
            f"num_draft_tokens: received {k}. Expected 0: this bundle has no draft; rebuild it "
            "with --draft."
        )
    if k > manifest.limits.max_draft_tokens:
        raise LimitExceeded("num_draft_tokens", k, manifest.limits.max_draft_tokens, "-k")
