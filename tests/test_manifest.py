"""The manifest survives a round trip, and nothing else passes for one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cards import MOST_NGRAM
from runtime.contract import CacheSpec
from runtime.errors import BundleError
from runtime.manifest import (
    SCHEMA,
    EagleDraft,
    FileRecord,
    Gate,
    LayerSkipDraft,
    Limits,
    Manifest,
    MedusaDraft,
    ModelCard,
    ModelDraft,
    NgramDraft,
    NgramPlusDraft,
    RetokenizedDraft,
)

TEXT = st.text(max_size=20)
COUNT = st.integers(1, 2**20)
FIGURE = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | TEXT

CACHES = st.builds(CacheSpec, layers=COUNT, kv_heads=COUNT, head_dim=COUNT, max_context=COUNT)
CARDS = st.builds(
    ModelCard,
    name=TEXT,
    model_type=TEXT,
    revision=TEXT,
    sha256=TEXT,
    parameters=COUNT,
    precision=TEXT,
    vocab_size=COUNT,
    cache=CACHES,
)
NGRAMS = st.tuples(st.integers(1, MOST_NGRAM), st.integers(1, MOST_NGRAM)).map(
    lambda bounds: NgramDraft(min_ngram=min(bounds), max_ngram=max(bounds))
)
MODELS = st.builds(ModelDraft, card=CARDS)
SKIPPED = st.sets(st.integers(0, 200), min_size=1).map(
    lambda layers: LayerSkipDraft(skipped_layers=tuple(sorted(layers)))
)
EAGLES = st.builds(
    EagleDraft,
    version=st.sampled_from((1, 3)),
    card=CARDS,
    taps=st.lists(COUNT, max_size=3).map(tuple),
    feature_width=COUNT,
    state_width=COUNT,
)
MEDUSAS = st.builds(
    MedusaDraft,
    name=TEXT,
    revision=TEXT,
    sha256=TEXT,
    parameters=COUNT,
    precision=TEXT,
    num_heads=st.integers(1, 9),
    vocab_size=COUNT,
    feature_width=COUNT,
)
RETOKENIZED = st.builds(RetokenizedDraft, card=CARDS)
WITH_WEIGHTS = MODELS | EAGLES | MEDUSAS | RETOKENIZED
DRAFTS = (
    WITH_WEIGHTS | NGRAMS | SKIPPED | st.builds(NgramPlusDraft, ngram=NGRAMS, other=WITH_WEIGHTS)
)
GATES = st.builds(
    Gate, name=TEXT, status=TEXT, reason=TEXT, figures=st.dictionaries(TEXT, FIGURE, max_size=3)
)
MANIFESTS = st.builds(
    Manifest,
    schema=st.just(SCHEMA),
    versions=st.dictionaries(TEXT, TEXT, max_size=3),
    backend=TEXT,
    target=CARDS,
    draft=st.none() | DRAFTS,
    limits=st.builds(
        Limits,
        max_batch=COUNT,
        max_context=st.integers(64, 2**20),
        max_draft_tokens=st.integers(0, 32),
    ),
    eos_token_ids=st.lists(COUNT, max_size=3).map(tuple),
    bos_token_id=st.none() | COUNT,
    tokenizer_sha256=TEXT,
    gates=st.lists(GATES, max_size=2).map(tuple),
    files=st.dictionaries(TEXT, st.builds(FileRecord, sha256=TEXT, bytes=COUNT), max_size=3),
)
EXAMPLE = Manifest(
    schema=SCHEMA,
    versions={"onnxruntime": "1.30.0"},
    backend="onnxruntime",
    target=ModelCard(
        name="t",
        model_type="llama",
        revision="",
        sha256="0",
        parameters=1,
        precision="int4",
        vocab_size=10,
        cache=CacheSpec(layers=1, kv_heads=1, head_dim=2, max_context=8),
    ),
    draft=NgramDraft(min_ngram=2, max_ngram=4),
    limits=Limits(max_batch=1, max_context=8, max_draft_tokens=2),
    eos_token_ids=(1,),
    bos_token_id=None,
    tokenizer_sha256="0",
    gates=(Gate(name="parity", status="passed", figures={"max_abs_diff": 1e-6}),),
    files={"a": FileRecord(sha256="0", bytes=1)},
)


@settings(deadline=None)
@given(MANIFESTS)
def test_round_trip(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all keys that the schema fixes (not those of free dictionaries)."""
    free = path and path[-1] in ("versions", "files", "figures")
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in paths_of(item, (*path, i))]
    if not isinstance(value, dict) or free:
        return []
    return [p for k, v in value.items() for p in [(*path, k), *paths_of(v, (*path, k))]]


def parent_of(raw: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        raw = raw[key]
    return raw


RAW = json.loads(EXAMPLE.to_json())


@pytest.mark.parametrize("path", paths_of(RAW), ids=lambda p: ".".join(map(str, p)))
def test_missing_and_renamed_keys_are_refused(path: tuple[Any, ...]) -> None:
    for renamed in (False, True):
        raw = json.loads(EXAMPLE.to_json())
        parent = parent_of(raw, path)
        value = parent.pop(path[-1])
        if renamed:
            parent["x-" + path[-1]] = value
        with pytest.raises(BundleError, match="schema" if path == ("schema",) else path[-1]):
            Manifest.from_json(json.dumps(raw))


@pytest.mark.parametrize("path", paths_of(RAW), ids=lambda p: ".".join(map(str, p)))
def test_values_of_another_kind_are_refused(path: tuple[Any, ...]) -> None:
    raw = json.loads(EXAMPLE.to_json())
    parent_of(raw, path)[path[-1]] = {"of": ["another", "kind"]}
    with pytest.raises(BundleError):
        Manifest.from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"schema": 0}', "{", '"manifest"'])
def test_other_documents_are_refused(text: str) -> None:
    with pytest.raises(BundleError):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch": 0, "max_context": 8, "max_draft_tokens": 0},
        {"max_batch": 1, "max_context": 1, "max_draft_tokens": 0},
        {"max_batch": 1, "max_context": 8, "max_draft_tokens": -1},
        {"max_batch": 1, "max_context": 8, "max_draft_tokens": 8},
        {"max_batch": 2**31, "max_context": 8, "max_draft_tokens": 0},
    ],
)
def test_senseless_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(BundleError, match="limits"):
        Limits(**limits)
    raw = RAW | {"limits": limits}
    with pytest.raises(BundleError, match="limits"):
        Manifest.from_json(json.dumps(raw))


@pytest.mark.parametrize("kind", ["oracle", "", None, 3, ["ngram"], {"ngram": 1}])
def test_an_unknown_kind_of_drafter_is_refused(kind: Any) -> None:
    raw = RAW | {"draft": RAW["draft"] | {"kind": kind}}
    with pytest.raises(BundleError, match=r"draft\.kind.*Expected one of model, ngram"):
        Manifest.from_json(json.dumps(raw))


@pytest.mark.parametrize(("least", "most"), [(0, 3), (4, 3), (2, MOST_NGRAM + 1)])
def test_senseless_bounds_of_a_lookup_are_refused(least: int, most: int) -> None:
    raw = RAW | {"draft": {"kind": "ngram", "min_ngram": least, "max_ngram": most}}
    with pytest.raises(BundleError, match="min_ngram"):
        Manifest.from_json(json.dumps(raw))


def test_the_width_of_q() -> None:
    """A draft model's own vocabulary; a lookup proposes any of the target's tokens, and so does a
    lookup before a model.
    """
    model = ModelDraft(card=replace(EXAMPLE.target, vocab_size=6))
    assert EXAMPLE.draft_vocab_size == 10
    assert replace(EXAMPLE, draft=model).draft_vocab_size == 6
    both = NgramPlusDraft(ngram=NgramDraft(min_ngram=2, max_ngram=4), other=model)
    assert replace(EXAMPLE, draft=both).draft_vocab_size == 10
    assert replace(EXAMPLE, draft=both).draft_model == model.card
