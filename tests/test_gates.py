"""The parts of the gates: figures, and the eager model with the engine's weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_checkpoints import llama_config, random_model
from transformers import PreTrainedModel

from export.gates import available_bytes, drift, relative_error, round_weights
from export.precision import PRECISIONS

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INT4 = PRECISIONS["int4"]


def values(model: PreTrainedModel, name: str) -> np.ndarray:
    return dict(model.named_parameters(remove_duplicate=False))[name].detach().numpy().copy()


def tied_model() -> PreTrainedModel:
    return random_model(llama_config(tie_word_embeddings=True)).requires_grad_(False)


def test_named_weights_are_rounded_and_no_others() -> None:
    model = tied_model()
    name, other = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
    before = {n: values(model, n) for n in (name, other)}
    round_weights(model, INT4, frozenset({name}))
    np.testing.assert_array_equal(values(model, name), INT4.rounded(before[name]))
    np.testing.assert_array_equal(values(model, other), before[other])


def test_a_tied_weight_that_is_rounded_everywhere_stays_tied() -> None:
    model = tied_model()
    before = values(model, HEAD)
    round_weights(model, INT4, frozenset({EMBEDDING, HEAD}))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    np.testing.assert_array_equal(values(model, HEAD), INT4.rounded(before))


def test_a_tied_weight_that_is_rounded_in_one_place_is_untied() -> None:
    """A table without whole blocks stays f32 beside its quantized head."""
    model = tied_model()
    before = values(model, HEAD)
    round_weights(model, INT4, frozenset({HEAD}))
    np.testing.assert_array_equal(values(model, EMBEDDING), before)
    np.testing.assert_array_equal(values(model, HEAD), INT4.rounded(before))
    hidden = torch.ones(1, before.shape[1])
    expected = hidden.numpy() @ INT4.rounded(before).T
    np.testing.assert_allclose(model.lm_head(hidden).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_unknown_names_are_an_error() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        round_weights(tied_model(), INT4, frozenset({"nowhere.weight"}))


def test_relative_error_is_0_for_equal_and_about_1_for_unrelated() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 50, 100))
    assert relative_error(a, a) == 0
    assert relative_error(np.zeros_like(a), a) == pytest.approx(1, abs=0.01)
    assert relative_error(b, a) == pytest.approx(2**0.5, abs=0.1)
    assert relative_error(a * 1.01, a) == pytest.approx(0.01, abs=1e-3)
    assert not relative_error(np.full_like(a, np.nan), a) <= 1e9  # as the gates ask it


def test_drift_counts_what_sampling_would_notice() -> None:
    logits = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)
    assert drift(logits, logits + 3) == {"drift_kl": pytest.approx(0, abs=1e-9), **AGREE}
    other = drift(logits, -logits)
    assert other["drift_kl"] > 0.5
    assert other["drift_top1_agreement"] < 0.2


AGREE = {"drift_top1_agreement": 1.0}


def test_available_memory_is_that_of_this_machine() -> None:
    assert 10_000_000 < available_bytes() < 2**50
