"""Opening checkpoints: every tensor as saved, one at a time, and clear refusals."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import VOCAB, edit_json, llama_config, random_model, save
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, GPT2Config
from transformers.utils import logging as transformers_logging

from export.checkpoint import Checkpoint, open_checkpoint
from export.eager import build_eager
from export.names import match_names
from runtime.errors import CheckpointError, UnsupportedModel

IDS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama") / "tiny-llama"
    save(directory, llama_config())
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def assert_same_weights(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    state = model.state_dict()
    matched = match_names(checkpoint, shapes(model))
    for name, value in state.items():
        loaded = checkpoint.load(matched[name])
        assert loaded.dtype == np.float32
        np.testing.assert_array_equal(loaded, value.float().numpy(), err_msg=name)


def test_every_tensor_is_as_saved(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    model = random_model(llama_config())
    assert checkpoint.names() == set(model.state_dict())
    assert checkpoint.name == "tiny-llama"
    assert checkpoint.config.model_type == "llama"
    assert checkpoint.parameters == sum(p.numel() for p in model.parameters())
    assert checkpoint.dtype("lm_head.weight") == "float32"
    assert_same_weights(checkpoint, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_widened_exactly_from_shards(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save(tmp_path, llama_config(), dtype=dtype, max_shard_size="20KB")
    checkpoint = open_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert checkpoint.dtype("lm_head.weight") == str(dtype).removeprefix("torch.")
    assert_same_weights(checkpoint, model)


def test_tied_head_resolves_to_the_embedding(tmp_path: Path) -> None:
    model = save(tmp_path, llama_config(tie_word_embeddings=True))
    checkpoint = open_checkpoint(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" in checkpoint.names()
    assert checkpoint.shape("lm_head.weight") == (VOCAB, 32)
    assert checkpoint.parameters == sum(p.numel() for p in model.parameters())
    assert_same_weights(checkpoint, model)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_head_that_is_stored_as_well(tmp_path: Path, equal: bool) -> None:
    """Equal values are one weight; others would make transformers untie the two."""
    save(tmp_path, llama_config(tie_word_embeddings=True))
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    checkpoint = rewrite(tmp_path, **{"lm_head.weight": head if equal else head + 1})
    expected = {n: checkpoint.shape(n) for n in checkpoint.names() - {"lm_head.weight"}}
    if equal:
        match_names(checkpoint, expected)
    else:
        with pytest.raises(CheckpointError, match=r"1 unexpected: lm_head\.weight"):
            match_names(checkpoint, expected)


@pytest.mark.parametrize("bare", [True, False])
def test_base_prefix_may_be_missing(tmp_path: Path, bare: bool) -> None:
    """The GPT-2 checkpoints on the hub name their tensors without `transformer.`."""
    config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    model = save(tmp_path, config)
    if bare:
        path = tmp_path / "model.safetensors"
        state = {k.removeprefix("transformer."): v for k, v in load_file(path).items()}
        state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # a mask that old checkpoints saved
        save_file(state, path, metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert_same_weights(checkpoint, model)
    assert_eager_models_agree(checkpoint)


def test_eager_models_agree(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert_eager_models_agree(checkpoint)
    assert checkpoint.eager_bytes() > 4 * checkpoint.parameters


def assert_eager_models_agree(checkpoint: Checkpoint) -> None:
    """Our way of filling a model, and transformers' own."""
    own, reference = build_eager(checkpoint).eval(), checkpoint.load_eager()
    assert reference.dtype == torch.float32
    torch.testing.assert_close(own(IDS).logits, reference(IDS).logits, rtol=0, atol=0)


def test_loading_a_model_prints_nothing(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And leaves transformers' progress bars to whoever wants them elsewhere."""
    transformers_logging.enable_progress_bar()
    open_checkpoint(saved).load_eager()
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.is_progress_bar_enabled()


def test_one_tensor_costs_one_tensor(tmp_path: Path) -> None:
    save(tmp_path, llama_config(vocab_size=40_000), dtype=torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    checkpoint.load("model.norm.weight")
    assert tracemalloc.get_traced_memory()[1] < 100_000
    embedding = checkpoint.load("model.embed_tokens.weight")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.6 * embedding.nbytes  # the bfloat16 and the float32 of one tensor


def test_digest_covers_configuration_and_weights(copy: Path, saved: Path) -> None:
    before = open_checkpoint(copy).sha256()
    assert before == open_checkpoint(saved).sha256()
    edit_json(copy / "config.json", rms_norm_eps=1e-3)
    changed = open_checkpoint(copy).sha256()
    flip_byte(copy / "model.safetensors", -1)
    assert len({before, changed, open_checkpoint(copy).sha256()}) == 3


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# Damage and foreign files


def test_truncated_file(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated or foreign"):
        open_checkpoint(copy)


def test_file_truncated_after_opening(copy: Path) -> None:
    checkpoint = open_checkpoint(copy)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(CheckpointError, match=r"received \d+ bytes.*Expected \d+"):
        checkpoint.load("model.norm.weight")


def test_foreign_file(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"<html>not found</html>" * 20)
    with pytest.raises(CheckpointError, match="truncated or foreign"):
        open_checkpoint(copy)


def test_missing_shard(tmp_path: Path) -> None:
    save(tmp_path, llama_config(), max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}.*missing"):
        open_checkpoint(tmp_path)


def test_index_that_leaves_the_directory(tmp_path: Path) -> None:
    save(tmp_path, llama_config(), max_shard_size="20KB")
    edit_json(tmp_path / "model.safetensors.index.json", weight_map={"x": "../model.safetensors"})
    with pytest.raises(CheckpointError, match="outside"):
        open_checkpoint(tmp_path)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> Checkpoint:
    path = directory / "model.safetensors"
    state = {k: v for k, v in (load_file(path) | changes).items() if v is not None}
    save_file(state, path, metadata={"format": "pt"})
    return open_checkpoint(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "1 missing: model.norm.weight"),
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight \[31\] instead of \[32\]"),
        ({"model.layers.0.extra": torch.ones(3)}, "1 unexpected: model.layers.0.extra"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    copy: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    checkpoint = rewrite(copy, **changes)
    with pytest.raises(CheckpointError, match=message):
        match_names(checkpoint, shapes(random_model(llama_config())))


def test_unknown_tensor(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.nothing'"):
        open_checkpoint(saved).load("model.nothing")


def test_quantized_values_are_refused(copy: Path) -> None:
    checkpoint = rewrite(copy, extra=torch.ones(4).to(torch.float8_e4m3fn))
    assert checkpoint.dtype("extra") == "F8_E4M3"
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        checkpoint.load("extra")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nonesuch"}, "'nonesuch'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"model_type": "bert"}, None),
    ],
)
def test_models_that_are_not_carried(
    copy: Path, changes: dict[str, object], message: str | None
) -> None:
    edit_json(copy / "config.json", **changes)
    if message is None:  # bert has a causal head in transformers; its tensors differ
        with pytest.raises(CheckpointError, match="missing"):
            match_names(open_checkpoint(copy), {"bert.embeddings.word_embeddings.weight": (1, 1)})
    else:
        with pytest.raises(UnsupportedModel, match=message):
            open_checkpoint(copy)


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "t5", "whisper", "clip"])
def test_other_kinds_of_models_are_refused_by_name(copy: Path, model_type: str) -> None:
    (copy / "config.json").write_text(json.dumps(CONFIG_MAPPING[model_type]().to_dict()))
    with pytest.raises(UnsupportedModel, match=model_type):
        open_checkpoint(copy)


def test_directories_without_a_checkpoint(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: received no such file"):
        open_checkpoint(tmp_path)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        open_checkpoint(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no readable JSON"):
        open_checkpoint(copy)


# The hub, offline


def test_hub_id_is_read_from_the_cache(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(saved, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    checkpoint = open_checkpoint("someone/tiny")
    assert (checkpoint.name, checkpoint.revision) == ("someone/tiny", commit)
    assert_same_weights(checkpoint, random_model(llama_config()))
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        open_checkpoint("someone/else")


def test_neither_path_nor_hub_id() -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint("./nowhere/at/all")


# Text


def test_end_tokens_are_the_union_of_all_places(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    edit_json(copy / "config.json", eos_token_id=[6, VOCAB])
    tokens = open_checkpoint(copy).special_tokens()
    assert tokens.bos_token_id == 256
    assert tokens.eos_token_ids == (257, 5, 7, 6)  # the tokenizer's first, none out of range


def test_defaults_of_the_configuration_class_are_not_taken(copy: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        (copy / name).unlink()
    edit_json(copy / "config.json", eos_token_id=None, bos_token_id=None)
    tokens = open_checkpoint(copy).special_tokens()
    assert (tokens.bos_token_id, tokens.eos_token_ids) == (None, ())


def test_save_tokenizer(copy: Path, tmp_path: Path) -> None:
    made = Tokenizer.from_file(str(copy / "tokenizer.json"))
    made.enable_truncation(3)
    made.enable_padding(length=8)
    made.save(str(copy / "tokenizer.json"))
    edit_json(copy / "tokenizer_config.json", chat_template="{{ messages }}\n")
    open_checkpoint(copy).save_tokenizer(tmp_path / "out")
    saved = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert saved.encode("the cat and hat").ids == tokens_of("the cat and hat", copy)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}\n"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [257]


def tokens_of(text: str, directory: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return list(tokenizer.encode(text).ids)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chat_template.jinja", "A", "A"),
        ("chat_template.json", '{"chat_template": "B"}', "B"),
        ("tokenizer_config.json", '{"chat_template": "C"}', "C"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "tool_use", "template": "x"},'
            ' {"name": "default", "template": "D"}]}',
            "D",
        ),
        ("tokenizer_config.json", "{}", None),
    ],
)
def test_chat_template_places(copy: Path, name: str, content: str, expected: str | None) -> None:
    (copy / "tokenizer_config.json").unlink()
    (copy / name).write_text(content)
    assert open_checkpoint(copy).text_files().chat_template == expected


def test_missing_tokenizer(copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no readable tokenizer.*tokenizer\.json"):
        open_checkpoint(copy).save_tokenizer(tmp_path / "out")
