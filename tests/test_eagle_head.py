"""EAGLE heads: every published layout gives the same head, and a wrong one is refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, llama_config, save, tokenizer, tokens
from tiny_heads import (
    HEAD_DIM,
    HIDDEN,
    KEPT,
    State,
    eagle1_config,
    eagle1_state,
    eagle3_state,
    embedding,
    maps,
    published_config,
    random_state,
    speculators_config,
    write_head,
)

from export.checkpoint import Checkpoint, open_checkpoint
from export.drafter_kind import DrafterKind, read_kind
from export.eagle_head import EagleHead, open_eagle
from runtime.errors import CheckpointError, UnsupportedModel, VocabularyMismatch

LAYERS = 10
TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("target") / "target"
    save(directory, llama_config(num_hidden_layers=LAYERS))
    return open_checkpoint(directory)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("shallow") / "target"
    save(directory, llama_config(num_hidden_layers=6, tie_word_embeddings=True))
    return open_checkpoint(directory)


def assert_weights(head: EagleHead, state: State) -> None:
    """Every tensor of the file is there under its canonical name, float32, and equal."""
    for name, value in state.items():
        if name not in ("d2t", "t2d"):
            loaded = head.load(name.replace("midlayer.", "layers.0."))
            assert loaded.dtype == np.float32
            np.testing.assert_array_equal(loaded, value.float().numpy(), err_msg=name)


def assert_shapes_hold(head: EagleHead) -> None:
    for name, shape in head.shapes().items():
        assert head.load(name).shape == shape, name


# Layouts


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_published_eagle3(
    target: Checkpoint, tmp_path: Path, file: str, dtype: torch.dtype
) -> None:
    state = eagle3_state(dtype=dtype)
    head = open_eagle(write_head(tmp_path / "head", published_config(), state, file), target)
    assert (head.name, head.revision, head.version) == ("head", "", 3)
    assert head.taps == (2, LAYERS // 2, LAYERS - 3)
    assert head.vocab_size == len(KEPT)
    assert head.d2t is not None
    np.testing.assert_array_equal(head.d2t + np.arange(len(KEPT)), KEPT)
    flags = (head.norm_before_residual, head.norm_before_fc, head.fc_norms, head.norm_output)
    assert not any(flags)
    assert set(head.borrowed) == {"embed_tokens.weight"}
    assert len(head.shapes()) == 14
    assert_weights(head, state)
    assert_shapes_hold(head)
    lent = target.load("model.embed_tokens.weight")
    np.testing.assert_array_equal(head.load("embed_tokens.weight"), lent)


def test_a_digest_for_each_head(target: Checkpoint, tmp_path: Path) -> None:
    """Of weights and configuration: another norm in config.json is another head."""
    config = published_config()
    for file in ("model.safetensors", "pytorch_model.bin"):
        first = write_head(tmp_path / file / "a", config, eagle3_state(), file)
        same = write_head(tmp_path / file / "b", config, eagle3_state(), file)
        other = published_config(norm_before_residual=True)
        third = write_head(tmp_path / file / "c", other, eagle3_state(), file)
        digests = [open_eagle(path, target).sha256 for path in (first, same, third)]
        assert digests[0] == digests[1] != digests[2]


def test_pickles_are_warned_of(
    target: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = eagle3_state()
    open_eagle(write_head(tmp_path / "a", published_config(), state), target)
    assert not caplog.records
    open_eagle(write_head(tmp_path / "b", published_config(), state, "pytorch_model.bin"), target)
    assert "save_file" in caplog.text


def test_layer_configuration(target: Checkpoint, tmp_path: Path) -> None:
    config = published_config(rope_theta=500000.0, rms_norm_eps=1e-6)
    layer = open_eagle(write_head(tmp_path, config, eagle3_state()), target).config
    assert layer.model_type == "llama"
    assert (layer.hidden_size, layer.head_dim, layer.num_hidden_layers) == (HIDDEN, HEAD_DIM, 1)
    assert layer.rope_parameters["rope_theta"] == 500000.0
    assert (layer.rms_norm_eps, layer.max_position_embeddings) == (1e-6, 64)


@pytest.mark.parametrize("architecture", ["Eagle3Speculator", "Eagle3DraftModel"])
def test_speculators_eagle3(target: Checkpoint, tmp_path: Path, architecture: str) -> None:
    state = eagle3_state("layers.0.") | embedding()
    config = speculators_config(architectures=[architecture])
    head = open_eagle(write_head(tmp_path, config, state), target)
    assert (head.version, head.taps) == (3, (2, 5, 7))
    assert head.norm_before_residual
    assert not head.borrowed
    assert_weights(head, state)
    assert_shapes_hold(head)


def test_speculators_leaves_out_defaults(target: Checkpoint, tmp_path: Path) -> None:
    """transformer_layer_config is a difference from the class: a missing key isn't the target's."""
    config = speculators_config()
    for key in ("rms_norm_eps", "hidden_act", "max_position_embeddings"):
        del config["transformer_layer_config"][key]
    state = eagle3_state("layers.0.") | embedding()
    layer = open_eagle(write_head(tmp_path, config, state), target).config
    assert (layer.rms_norm_eps, layer.max_position_embeddings) == (1e-6, 2048)


def test_speculators_qwen3_layer(target: Checkpoint, tmp_path: Path) -> None:
    norms = {f"layers.0.self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
    state = eagle3_state("layers.0.") | embedding() | random_state(norms, torch.float16)
    unused = {"use_sliding_window": False, "sliding_window": 4096}
    layer = {"model_type": "qwen3", "head_dim": HEAD_DIM} | unused
    head = open_eagle(write_head(tmp_path, speculators_config(layer=layer), state), target)
    assert head.config.model_type == "qwen3"
    assert_weights(head, state)


@pytest.mark.parametrize(
    ("flags", "shapes"),
    [
        ({"norm_before_fc": True}, {"input_norm.weight": (3 * HIDDEN,)}),
        ({"fc_norm": True}, {f"fc_norm.{j}.weight": (HIDDEN,) for j in range(3)}),
        ({"norm_output": True}, {}),
    ],
)
@pytest.mark.parametrize("layout", [published_config, speculators_config])
def test_norms(
    target: Checkpoint,
    tmp_path: Path,
    flags: dict[str, bool],
    shapes: dict[str, tuple[int, ...]],
    layout: Any,
) -> None:
    state = eagle3_state("layers.0.") | random_state(shapes, torch.float16)
    head = open_eagle(write_head(tmp_path, layout(**flags), state), target)
    read = {"norm_before_fc": head.norm_before_fc, "fc_norm": head.fc_norms}
    read["norm_output"] = head.norm_output
    assert {name for name, value in read.items() if value} == flags.keys()
    assert_weights(head, state)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stated", [True, False])
def test_eagle1(target: Checkpoint, tmp_path: Path, bias: bool, stated: bool) -> None:
    config = eagle1_config(bias=bias) if stated else eagle1_config()
    state = eagle1_state(bias=bias)
    head = open_eagle(write_head(tmp_path, config, state, "pytorch_model.bin"), target)
    assert (head.version, head.taps, head.vocab_size, head.d2t) == (1, (), VOCAB, None)
    assert set(head.borrowed) == {"lm_head.weight"}
    assert ("fc.bias" in head.shapes()) == bias
    assert "layers.0.input_layernorm.weight" not in head.shapes()
    assert_weights(head, state)
    np.testing.assert_array_equal(head.load("lm_head.weight"), target.load("lm_head.weight"))


def test_eagle1_of_a_tied_target(shallow: Checkpoint, tmp_path: Path) -> None:
    """Six layers are no obstacle: EAGLE-1 has no taps; and the head is the embedding."""
    head = open_eagle(write_head(tmp_path, eagle1_config(), eagle1_state()), shallow)
    lent = shallow.load("model.embed_tokens.weight")
    np.testing.assert_array_equal(head.load("lm_head.weight"), lent)


def test_eagle1_for_qwen2_has_biases(target: Checkpoint, tmp_path: Path) -> None:
    biases = {
        f"layers.0.self_attn.{n}_proj.bias": (HEAD_DIM * c,)
        for n, c in zip("qkv", (4, 2, 2), strict=True)
    }
    state = eagle1_state() | random_state(biases, torch.float16)
    config = eagle1_config() | {"model_type": "qwen2"}
    assert_weights(open_eagle(write_head(tmp_path, config, state), target), state)


def test_another_hidden_size_than_the_targets(target: Checkpoint, tmp_path: Path) -> None:
    """With its own embedding, and target_hidden_size saying what fc reads."""
    config = published_config(hidden_size=64, head_dim=HEAD_DIM, target_hidden_size=HIDDEN)
    state = eagle3_state(hidden=64) | embedding(64)
    head = open_eagle(write_head(tmp_path, config, state), target)
    assert (head.config.hidden_size, head.target_hidden_size) == (64, HIDDEN)
    assert_weights(head, state)


def test_whole_vocabulary_needs_no_map(target: Checkpoint, tmp_path: Path) -> None:
    state = eagle3_state(kept=np.arange(VOCAB))
    del state["d2t"], state["t2d"]
    for stated in (VOCAB, None):
        config = published_config(draft_vocab_size=stated)
        head = open_eagle(write_head(tmp_path, config, state), target)
        assert (head.vocab_size, head.d2t) == (VOCAB, None)


def test_maps_that_nobody_filled(target: Checkpoint, tmp_path: Path) -> None:
    """A head over the whole vocabulary ignores them; one that says something must be right."""
    config = published_config(draft_vocab_size=VOCAB)
    state = eagle3_state(kept=np.arange(VOCAB))
    state["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    assert open_eagle(write_head(tmp_path, config, state), target).d2t is None
    state["d2t"][5] = 1
    with pytest.raises(VocabularyMismatch, match="Expected ascending ids"):
        open_eagle(write_head(tmp_path, config, state), target)


def test_what_only_training_needs_is_left_out(target: Checkpoint, tmp_path: Path) -> None:
    spare = {"verifier_norm.weight": (HIDDEN,), "verifier_lm_head.weight": (len(KEPT), HIDDEN)}
    buffer = {"layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    state = eagle3_state("layers.0.") | random_state(spare | buffer, torch.float16)
    head = open_eagle(write_head(tmp_path, speculators_config(), state), target)
    assert not head.shapes().keys() & (spare | buffer).keys()


# Taps


@pytest.mark.parametrize(
    ("stated", "taps"),
    [
        ({TAPS: [1, 3, 8]}, (1, 3, 8)),  # speculators and vLLM: hidden_states[id]
        ({"eagle_config": {TAPS: [1, 3, 8]}}, (2, 4, 9)),  # SGLang: outputs of layers from 1 on
        ({"eagle_config": {TAPS: [2, 3, 8]}}, (2, 3, 8)),  # and otherwise their inputs
        ({TAPS: None, "eagle_config": {"use_aux_hidden_state": True}}, (2, 5, 7)),
        ({TAPS: [0, 1, 9]}, (0, 1, 9)),
    ],
)
def test_taps(
    target: Checkpoint, tmp_path: Path, stated: dict[str, Any], taps: tuple[int, ...]
) -> None:
    head = open_eagle(write_head(tmp_path, published_config(**stated), eagle3_state()), target)
    assert head.taps == taps


def test_taps_one_below_the_usual_are_warned_of(
    target: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = published_config(**{TAPS: [1, LAYERS // 2 - 1, LAYERS - 4]})
    head = open_eagle(write_head(tmp_path, config, eagle3_state()), target)
    assert head.taps == (1, 4, 6)
    assert "1.0" in caplog.text


# Refusals: the configuration


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_hidden_layers": 2}, UnsupportedModel, "num_hidden_layers 2. Expected 1"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
        ({"model_type": "mixtral"}, UnsupportedModel, "model type 'mixtral'"),
        ({"hidden_size": "32"}, CheckpointError, "transformers refuses"),
        ({"layer_types": ["sliding_attention"]}, UnsupportedModel, "sliding window"),
        ({"sliding_window": 512}, UnsupportedModel, "sliding window"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 512},
            UnsupportedModel,
            "sliding window",
        ),
        ({"speculators_model_type": "dflash"}, UnsupportedModel, "'dflash'. Expected 'eagle3'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModel, "without taps"),
        ({"norm_before_fc": True, "fc_norm": True}, CheckpointError, "both"),
        ({"target_hidden_size": 48}, CheckpointError, r"hidden size 48\. Expected 32"),
        ({"hidden_size": 64}, CheckpointError, r"hidden size 64\. Expected 32"),
        ({"vocab_size": VOCAB + 8}, VocabularyMismatch, r"308 tokens\. Expected 300"),
        ({"draft_vocab_size": 9}, VocabularyMismatch, "draft_vocab_size 9 and 10 rows"),
        ({TAPS: [2, 5]}, UnsupportedModel, r"\[2, 5\]\. Expected 3"),
        ({TAPS: [2, 5, 6, 7]}, UnsupportedModel, "Expected 3"),
        ({TAPS: [5, 2, 7]}, UnsupportedModel, "ascending"),
        ({TAPS: [2, 2, 7]}, UnsupportedModel, "ascending"),
        ({TAPS: [2, 5, LAYERS]}, CheckpointError, "Expected 0 to 9"),
        ({TAPS: [-1, 5, 7]}, CheckpointError, "Expected 0 to 9"),
        ({TAPS: "2,5,7"}, CheckpointError, "'2,5,7'. Expected list or null"),
        ({TAPS: [2, 5.0, 7]}, CheckpointError, "list of layer numbers"),
        ({"attention_bias": True}, CheckpointError, "4 missing: .*k_proj.bias"),
        ({"norm_before_fc": True}, CheckpointError, "1 missing: input_norm.weight"),
        ({"intermediate_size": 64}, CheckpointError, r"gate_proj.weight \[48, 32\] instead of"),
    ],
)
def test_configurations_that_do_not_fit(
    target: Checkpoint,
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[CheckpointError],
    message: str,
) -> None:
    directory = write_head(tmp_path, published_config(**changes), eagle3_state())
    with pytest.raises(error, match=message):
        open_eagle(directory, target)


def keys_of(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, key))


@pytest.mark.parametrize("layout", [published_config, speculators_config])
@pytest.mark.parametrize("value", ["x", -1, 0, [None], {"x": 1}])
def test_nonsense_is_refused_or_harmless(
    target: Checkpoint, tmp_path: Path, layout: Any, value: Any
) -> None:
    """Whatever a key holds, no other error than the project's own comes out."""
    spare = {"eagle_config": None, "layer_types": None, "bias": None, TAPS: None}
    write_head(tmp_path, layout(), eagle3_state("layers.0."))
    refused = 0
    for *above, key in keys_of(layout() | spare):
        config: dict[str, Any] = layout()
        reduce(lambda part, name: part[name], above, config)[key] = value
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            open_eagle(tmp_path, target)
        except CheckpointError:
            refused += 1
    assert refused > 8


def test_default_taps_need_seven_layers(shallow: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"target of 6 layers.*at least 7"):
        open_eagle(write_head(tmp_path / "a", published_config(), eagle3_state()), shallow)
    stated = published_config(**{TAPS: [1, 3, 4]})
    assert open_eagle(write_head(tmp_path / "b", stated, eagle3_state()), shallow).taps == (1, 3, 4)


def test_head_of_another_architecture(target: Checkpoint, tmp_path: Path) -> None:
    config = speculators_config()
    config["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    state = eagle3_state("layers.0.") | embedding()
    with pytest.raises(CheckpointError, match=r"Qwen3ForCausalLM.*LlamaForCausalLM"):
        open_eagle(write_head(tmp_path, config, state), target)


def test_head_of_another_name_is_only_warned_of(
    target: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    config = speculators_config()
    state = eagle3_state("layers.0.") | embedding()
    open_eagle(write_head(tmp_path, config, state), target)
    assert not caplog.records
    config["speculators_config"]["verifier"]["name_or_path"] = "acme/other"
    open_eagle(write_head(tmp_path, config, state), target)
    assert "made for acme/other" in caplog.text


def test_head_with_another_tokenizer(target: Checkpoint, tmp_path: Path) -> None:
    """Heads seldom carry one; where they do, equal ids must mean equal text."""
    write_head(tmp_path, published_config(), eagle3_state())
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    open_eagle(tmp_path, target)
    names = tokens()
    names[5], names[6] = names[6], names[5]
    tokenizer(names).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(VocabularyMismatch, match="token 5 is"):
        open_eagle(tmp_path, target)


# Refusals: the tensors

OFFSETS = maps()["d2t"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"midlayer.mlp.up_proj.weight": None}, r"1 missing: layers\.0\.mlp\.up_proj"),
        ({"midlayer.hidden_norm.weight": None}, r"1 missing: layers\.0\.hidden_norm"),
        ({"norm.weight": None, "fc.weight": None}, "2 missing: fc.weight, norm.weight"),
        ({"fc.bias": torch.zeros(HIDDEN)}, "1 unexpected: fc.bias"),
        ({"mask_hidden": torch.zeros(1, HIDDEN)}, "1 unexpected: mask_hidden"),
        ({"norm.weight": torch.zeros(HIDDEN + 1)}, r"norm.weight \[33\] instead of \[32\]"),
        ({"fc.weight": torch.zeros(HIDDEN, 3 * 48)}, "width 144. Expected 96: 3 taps"),
        ({"fc.weight": torch.zeros(HIDDEN, 4 * HIDDEN)}, "width 128. Expected 96: 3 taps"),
        ({"d2t": None}, "t2d but no d2t"),
        ({"d2t": None, "t2d": None}, "10 tokens and no d2t"),
        ({"d2t": OFFSETS[torch.randperm(10, generator=torch.Generator().manual_seed(1))]}, "d2t"),
        ({"d2t": OFFSETS + 50}, "Expected 0 to 299"),
        ({"d2t": OFFSETS[:-1]}, "9 entries. Expected 10"),
        ({"d2t": torch.zeros(10, dtype=torch.int64)}, "d2t says otherwise"),
        ({"d2t": OFFSETS.float()}, "float32"),
        ({"t2d": maps(KEPT + np.eye(10, dtype=int)[2])["t2d"]}, "d2t says otherwise"),
        ({"t2d": torch.ones(VOCAB + 1, dtype=torch.bool)}, r"\[301\]\. Expected \[300\]"),
        ({"lm_head.weight": None}, "draft_vocab_size 10 and 300 rows"),
    ],
)
def test_tensors_that_do_not_fit(
    target: Checkpoint, tmp_path: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    state = {k: v for k, v in (eagle3_state() | tensors).items() if v is not None}
    with pytest.raises(CheckpointError, match=message):
        open_eagle(write_head(tmp_path, published_config(), state), target)


def test_shuffled_map_without_t2d(target: Checkpoint, tmp_path: Path) -> None:
    """Two entries changed places: each is in range, and only their order betrays them."""
    shuffled = KEPT.copy()
    shuffled[[3, 5]] = shuffled[[5, 3]]
    state = eagle3_state(kept=shuffled)
    del state["t2d"]
    with pytest.raises(VocabularyMismatch, match="Expected ascending ids"):
        open_eagle(write_head(tmp_path, published_config(), state), target)


def test_no_embedding_of_the_heads_own_width(target: Checkpoint, tmp_path: Path) -> None:
    config = published_config(hidden_size=64, head_dim=HEAD_DIM, target_hidden_size=HIDDEN)
    with pytest.raises(CheckpointError, match=r"no embed_tokens.*64 isn't the target's 32"):
        open_eagle(write_head(tmp_path, config, eagle3_state(hidden=64)), target)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["fc.weight", "embed_tokens.weight"])
def test_values_that_are_no_numbers(
    target: Checkpoint, tmp_path: Path, value: float, name: str
) -> None:
    state = eagle3_state() | embedding()
    state[name][1, 2] = value
    head = open_eagle(write_head(tmp_path, published_config(), state), target)
    with pytest.raises(CheckpointError, match=f"{name}: received 1 values"):
        head.load(name)


# Refusals: the files


def test_pickle_that_would_run_code(target: Checkpoint, tmp_path: Path) -> None:
    write_head(tmp_path, published_config(), {}, "pytorch_model.bin")
    torch.save({"fc.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="restricted reader refuses"):
        open_eagle(tmp_path, target)


@pytest.mark.parametrize(
    ("saved", "message"),
    [([torch.zeros(1)], "received list"), ({"state": {"x": torch.zeros(1)}}, "no tensor")],
)
def test_pickle_of_something_else(
    target: Checkpoint, tmp_path: Path, saved: Any, message: str
) -> None:
    write_head(tmp_path, published_config(), {}, "pytorch_model.bin")
    torch.save(saved, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        open_eagle(tmp_path, target)


def test_truncated_pickle(target: Checkpoint, tmp_path: Path) -> None:
    write_head(tmp_path, published_config(), eagle3_state(), "pytorch_model.bin")
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="download it again"):
        open_eagle(tmp_path, target)


def test_no_weights(target: Checkpoint, tmp_path: Path) -> None:
    write_head(tmp_path, published_config(), {}).joinpath("model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        open_eagle(tmp_path, target)


# The hub, offline


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_hub_id_is_read_from_the_cache(
    target: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--head"
    write_head(repository / "snapshots" / commit, published_config(), eagle3_state(), file)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert read_kind("someone/head") is DrafterKind.EAGLE
    head = open_eagle("someone/head", target)
    assert (head.name, head.revision) == ("someone/head", commit)
    assert_weights(head, eagle3_state())
