"""Checkpoints of a shape with random weights: that they build, and nothing half is left."""

from __future__ import annotations

import copy
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from transformers import PretrainedConfig

from export.build import BuildRequest, build
from export.checkpoint import open_checkpoint
from runtime import Decoder, SamplingParams
from scripts import random_checkpoint
from scripts.random_checkpoint import SHAPES, checkpoint_bytes, write_checkpoint


def small(name: str) -> PretrainedConfig:
    """Of the same kind; nothing else of it is kept but how it ties."""
    found = copy.deepcopy(SHAPES[name])
    found.hidden_size, found.intermediate_size, found.num_hidden_layers = 128, 256, 2
    found.num_attention_heads, found.num_key_value_heads, found.vocab_size = 4, 2, 300
    found.head_dim, found.layer_types = 32, None
    return found


@pytest.mark.parametrize("name", ["llama-8b", "llama-1b"])
def test_one_builds_and_decodes(tmp_path: Path, name: str) -> None:
    config, out = small(name), tmp_path / "random"
    count = write_checkpoint(config, out)
    assert open_checkpoint(out).parameters == count == checkpoint_bytes(config) // 2
    request = BuildRequest(
        target=str(out), draft=str(out), out=tmp_path / "bundle", precision="fp32",
        draft_precision="fp32", max_context=64, max_draft_tokens=2,
    )  # fmt: skip
    with Decoder.load(build(request)) as decoder:
        found = decoder.generate("abc", SamplingParams(max_tokens=8))
    assert len(found.token_ids) > 0


def test_it_packs_small_and_repeats_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_checkpoint, "BLOCK", 128 * 31)
    write_checkpoint(small("llama-8b"), tmp_path / "random")
    weight = open_checkpoint(tmp_path / "random").load("model.layers.0.mlp.up_proj.weight")
    assert len(np.unique(weight, axis=0)) > 30, "rows of a block differ"
    assert 0.5 < weight.std() * weight.shape[1] ** 0.5 < 1.5
    packed = zlib.compress(weight.astype(np.float16).tobytes())
    assert len(packed) < 0.4 * 2 * weight.size


def test_bad_input_is_told_and_leaves_nothing(tmp_path: Path, root: Path) -> None:
    out = tmp_path / "random"
    script = [sys.executable, str(root / "scripts" / "random_checkpoint.py")]
    done = subprocess.run([*script, "llama-9b", str(out)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "llama-8b" in done.stderr
    out.mkdir()
    done = subprocess.run([*script, "llama-8b", str(out)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "is there already" in done.stderr
    assert not any(out.iterdir())
