"""Medusa heads: every published layout gives the same names, and wrong ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, llama_config, save
from tiny_heads import (
    HIDDEN,
    State,
    eagle1_config,
    eagle1_state,
    eagle3_state,
    embedding,
    medusa_config,
    medusa_state,
    published_config,
    speculators_config,
    vllm_medusa_state,
    write_head,
)

from export.checkpoint import Checkpoint, open_checkpoint
from export.drafter_kind import DrafterKind, read_kind
from export.medusa_heads import MedusaHeads, open_medusa
from runtime.errors import CheckpointError, UnsupportedModel, VocabularyMismatch

MAP = torch.tensor([31, 4, 299, 0, 257])  # by frequency: any order


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("target") / "target"
    save(directory, llama_config())
    return open_checkpoint(directory)


def assert_same(heads: MedusaHeads, name: str, value: torch.Tensor) -> None:
    loaded = heads.load(name)
    assert loaded.dtype == np.float32
    assert heads.shapes()[name] == loaded.shape
    np.testing.assert_array_equal(loaded, value.float().numpy(), err_msg=name)


# Layouts


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_published(
    target: Checkpoint, tmp_path: Path, file: str, version: int, layers: int
) -> None:
    state = medusa_state(version=version, layers=layers)
    config = medusa_config(medusa_num_layers=layers)
    heads = open_medusa(write_head(tmp_path / "heads", config, state, file), target)
    assert (heads.name, heads.revision, heads.version) == ("heads", "", version)
    assert (heads.num_heads, heads.num_layers) == (3, layers)
    assert (heads.vocab_size, heads.d2t, heads.borrows_head) == (VOCAB, None, version == 2)
    assert len(heads.shapes()) == len(state)
    for i in range(3):
        for j in range(layers):
            for part in ("weight", "bias"):
                assert_same(heads, f"heads.{i}.layers.{j}.{part}", state[f"{i}.{j}.linear.{part}"])
        if version == 1:
            assert_same(heads, f"heads.{i}.lm_head.weight", state[f"{i}.{layers}.weight"])


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_prefixes(target: Checkpoint, tmp_path: Path, prefix: str) -> None:
    state = medusa_state(prefix=prefix)
    heads = open_medusa(write_head(tmp_path, medusa_config(), state), target)
    assert_same(heads, "heads.2.layers.0.bias", state[f"{prefix}2.0.linear.bias"])


def test_vllm(target: Checkpoint, tmp_path: Path) -> None:
    """Without biases, which are zero then."""
    state = vllm_medusa_state()
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 2}
    heads = open_medusa(write_head(tmp_path, config, state), target)
    assert (heads.num_heads, heads.num_layers, heads.version) == (2, 2, 1)
    for i in range(2):
        assert_same(heads, f"heads.{i}.lm_head.weight", state[f"lm_heads.{i}.weight"])
        for j in range(2):
            name = f"heads.{i}.layers.{j}"
            assert_same(heads, f"{name}.weight", state[f"blocks.{i}.layers.{j}.weight"])
            assert_same(heads, f"{name}.bias", torch.zeros(HIDDEN))


@pytest.mark.parametrize("rows", [len(MAP), VOCAB])
def test_token_map(target: Checkpoint, tmp_path: Path, rows: int) -> None:
    """A matrix over the whole vocabulary is cut to the map's rows, as vLLM does."""
    state = vllm_medusa_state(rows=rows) | {"token_map": MAP}
    heads = open_medusa(write_head(tmp_path, {"model_type": "medusa"}, state), target)
    assert heads.vocab_size == len(MAP)
    assert heads.d2t is not None
    np.testing.assert_array_equal(heads.d2t + np.arange(len(MAP)), MAP.numpy())
    whole = state["lm_heads.1.weight"]
    assert_same(heads, "heads.1.lm_head.weight", whole[MAP] if rows == VOCAB else whole)


# Configurations that disagree are believed less than the tensors


@pytest.mark.parametrize(
    ("changes", "version", "message"),
    [
        ({"medusa_num_heads": 5}, 1, "medusa_num_heads 5, the tensors 3"),
        ({"medusa_num_layers": 2}, 1, "medusa_num_layers 2, the tensors 1"),
        ({"version": "2"}, 1, "version 2, the tensors 1"),
        ({"version": "1"}, 2, "version 1, the tensors 2"),
        ({"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}, 1, "made for lmsys/vicuna"),
    ],
)
def test_configurations_that_disagree(
    target: Checkpoint,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    version: int,
    message: str,
) -> None:
    state = medusa_state(version=version)
    open_medusa(write_head(tmp_path, medusa_config(), state), target)
    assert not caplog.records
    heads = open_medusa(write_head(tmp_path, medusa_config(**changes), state), target)
    assert message in caplog.text
    assert (heads.num_heads, heads.num_layers, heads.version) == (3, 1, version)


# Refusals


def wide(state: State, size: int) -> State:
    return {k: torch.zeros([size if d == HIDDEN else d for d in v.shape]) for k, v in state.items()}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"fc.weight": torch.zeros(2, 2)}, CheckpointError, r"fc\.weight\. Expected names of"),
        ({"extra": torch.zeros(2)} | medusa_state(), CheckpointError, r"extra\. Expected names"),
        ({}, CheckpointError, "no tensors"),
        (wide(medusa_state(), 48), CheckpointError, r"\[48\]\. Expected 32 wide.*of target"),
        (medusa_state(rows=VOCAB + 8), VocabularyMismatch, "308 rows. Expected 300"),
        (vllm_medusa_state(rows=5), VocabularyMismatch, "5 rows. Expected 300"),
        (
            vllm_medusa_state(rows=6) | {"token_map": MAP},
            VocabularyMismatch,
            "6 rows. Expected 5 or 300",
        ),
        (vllm_medusa_state() | {"token_map": MAP + 1}, VocabularyMismatch, "1 to 300. Expected 0"),
        (vllm_medusa_state() | {"token_map": MAP * 0}, VocabularyMismatch, "of which 1 differ"),
        (vllm_medusa_state() | {"token_map": MAP.float()}, VocabularyMismatch, "float32"),
        (medusa_state(version=2) | {"token_map": MAP}, UnsupportedModel, "without output"),
    ],
)
def test_tensors_that_do_not_fit(
    target: Checkpoint,
    tmp_path: Path,
    state: State,
    error: type[CheckpointError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        open_medusa(write_head(tmp_path, medusa_config(), state), target)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("1.0.linear.weight", r"heads\.1\.layers\.0\.weight"),
        ("2.0.linear.bias", r"heads\.2\.layers\.0\.bias"),
        ("0.1.weight", r"heads\.0\.lm_head\.weight"),
    ],
)
def test_head_that_lacks_a_tensor(
    target: Checkpoint, tmp_path: Path, lost: str, message: str
) -> None:
    state = medusa_state()
    del state[lost]
    with pytest.raises(CheckpointError, match=f"1 missing: {message}"):
        open_medusa(write_head(tmp_path, medusa_config(), state), target)


def test_layers_that_all_heads_lack(target: Checkpoint, tmp_path: Path) -> None:
    """The place of the output matrix says how many there were."""
    state = {k: v for k, v in medusa_state(layers=2).items() if ".1.linear" not in k}
    with pytest.raises(CheckpointError, match=r"missing: heads\.0\.layers\.1\.weight"):
        open_medusa(write_head(tmp_path, medusa_config(), state), target)


def test_one_matrix_for_all_heads(target: Checkpoint, tmp_path: Path) -> None:
    config = {"model_type": "medusa", "original_lm_head": True}
    with pytest.raises(UnsupportedModel, match="original_lm_head"):
        open_medusa(write_head(tmp_path, config, vllm_medusa_state()), target)


def test_values_that_are_no_numbers(target: Checkpoint, tmp_path: Path) -> None:
    state = medusa_state()
    state["1.0.linear.weight"][0, 0] = torch.inf
    heads = open_medusa(write_head(tmp_path, medusa_config(), state), target)
    with pytest.raises(CheckpointError, match="received 1 values"):
        heads.load("heads.1.layers.0.weight")
    with pytest.raises(CheckpointError, match=r"heads\.7"):
        heads.load("heads.7.layers.0.weight")


# Which kind of drafter it is


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("config", "state", "kind"),
    [
        (published_config(), eagle3_state(), DrafterKind.EAGLE),
        (speculators_config(), eagle3_state("layers.0.") | embedding(), DrafterKind.EAGLE),
        (eagle1_config(), eagle1_state(), DrafterKind.EAGLE),
        (medusa_config(), medusa_state(), DrafterKind.MEDUSA),
        ({}, medusa_state(version=2), DrafterKind.MEDUSA),
        ({"model_type": "medusa"}, vllm_medusa_state(), DrafterKind.MEDUSA),
        ({"model_type": "llama"}, {"model.norm.weight": torch.zeros(2)}, DrafterKind.MODEL),
    ],
)
def test_kinds(
    tmp_path: Path, file: str, config: dict[str, Any], state: State, kind: DrafterKind
) -> None:
    assert read_kind(write_head(tmp_path, config, state, file)) is kind


def test_kind_of_models(tmp_path: Path) -> None:
    save(tmp_path, llama_config())
    assert read_kind(tmp_path) is DrafterKind.MODEL
    assert read_kind("model.gguf") is DrafterKind.MODEL
    with pytest.raises(CheckpointError, match="no such directory"):
        read_kind("nowhere")
