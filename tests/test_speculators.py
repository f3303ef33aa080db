"""Heads that the speculators library itself saves are read, and compute what the library computes.

The library pins an older transformers than the exporter needs, so no extra can install both. It
runs with the newer one all the same:

    pip install --no-deps speculators hs-connectors loguru openai datasets multiprocess pandas \
        pyarrow dill xxhash pydantic-settings
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_reference import EagleReference
from tiny_checkpoints import VOCAB, llama_config, save
from tiny_heads import HIDDEN, KEPT, layer_config, maps
from transformers import CONFIG_MAPPING

from export.checkpoint import Checkpoint, open_checkpoint
from export.drafter_kind import DrafterKind, read_kind
from export.eagle_head import open_eagle

# The library's imports warn of what they themselves use.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 7
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("target") / "target"
    save(directory, llama_config(num_hidden_layers=10))
    return open_checkpoint(directory)


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("speculators.models.eagle3", exc_type=ImportError)


def make(library: Any, kind: str, **flags: Any) -> Any:
    """A head of the library with random weights; `eager` attention runs without a GPU."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = CONFIG_MAPPING[kind](**layer_config(model_type=kind, head_dim=8))
    layer._attn_implementation = "eager"
    config = library.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(KEPT),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="acme/target", architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    torch.manual_seed(5)
    model = library.Eagle3DraftModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.load_vocab_mappings(**maps())
    return model


def library_logits(model: Any, taps: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of two steps, each [length, D]; the second reads the first one's states."""
    logits: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0]))
    model(taps[None], ids[None], torch.zeros(1, LENGTH, dtype=torch.int64), ttt_steps=2)
    hook.remove()
    return logits


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_saved_by_the_library(
    library: Any, target: Checkpoint, tmp_path: Path, kind: str, flag: str | None
) -> None:
    """Both steps of every variant, and every tensor, within float32 rounding."""
    model = make(library, kind, **({flag: True} if flag else {}))
    model.save_pretrained(tmp_path)
    assert read_kind(tmp_path) is DrafterKind.EAGLE
    head = open_eagle(tmp_path, target)
    assert (head.taps, head.borrowed) == ((2, 5, 7), frozenset())
    for name in head.shapes():
        np.testing.assert_array_equal(head.load(name), model.state_dict()[name].numpy())

    taps = torch.randn(LENGTH, 3 * HIDDEN, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2))
    first, second = library_logits(model, taps, ids)
    reference, at = EagleReference(head), torch.arange(LENGTH)
    causal, own = at[:, None] >= at, torch.eye(LENGTH, dtype=torch.bool)
    logits, g = reference.step(ids, reference.fuse(taps), at, causal)
    torch.testing.assert_close(logits, first, rtol=1e-4, atol=1e-4)
    # From each position on, one step further: its tokens are the next ones of the text.
    logits, _ = reference.step(ids.roll(-1), g, at + 1, torch.cat([causal, own], dim=1))
    torch.testing.assert_close(logits[:-1], second[:-1], rtol=1e-4, atol=1e-4)


def test_taps_of_the_library(library: Any, target: Checkpoint, tmp_path: Path) -> None:
    make(library, "llama", eagle_aux_hidden_state_layer_ids=[1, 4, 8]).save_pretrained(tmp_path)
    assert open_eagle(tmp_path, target).taps == (1, 4, 8)
