"""GGUF files: names, layouts, dequantized values and text as transformers and gguf read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import torch
from gguf import GGMLQuantizationType, GGUFReader
from tiny_checkpoints import tokens
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from export.checkpoint import Checkpoint, open_checkpoint
from export.gguf_file import read_gguf
from export.names import match_names
from runtime.errors import CheckpointError, UnsupportedModel

Q4_1, Q8_0, F16 = (GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F16"))
BF16, F32 = GGMLQuantizationType.BF16, GGMLQuantizationType.F32
EXAMPLE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def reference_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )


def assert_bit_equal(checkpoint: Checkpoint, reference: PreTrainedModel) -> None:
    state = reference.state_dict()
    matched = match_names(checkpoint, {name: tuple(v.shape) for name, v in state.items()})
    for name, value in state.items():
        received = checkpoint.load(matched[name])
        np.testing.assert_array_equal(received, value.numpy(), err_msg=name, strict=True)


@pytest.mark.parametrize(
    ("architecture", "kind", "tied"),
    [
        ("llama", F32, False),
        ("llama", Q4_1, True),
        ("qwen2", Q8_0, False),
        ("qwen2", F16, True),
        ("qwen3", BF16, False),
    ],
)
def test_tensors_and_configuration_are_those_of_transformers(
    path: Path, architecture: str, kind: GGMLQuantizationType, tied: bool
) -> None:
    weights = tiny_gguf.write(path, architecture, kind=kind, tied=tied)
    checkpoint = open_checkpoint(path)
    reference = reference_model(path)
    assert_bit_equal(checkpoint, reference)
    assert_same_configuration(checkpoint, reference)
    assert checkpoint.dtype("model.embed_tokens.weight") == kind.name
    if kind == F32:
        for name, value in weights.items():
            np.testing.assert_array_equal(checkpoint.load(name), value, err_msg=name)


def assert_same_configuration(checkpoint: Checkpoint, reference: PreTrainedModel) -> None:
    """But for what transformers' reader leaves to class defaults: names and special tokens."""
    ignored = {"_name_or_path", "architectures", "dtype", "quantization_config"}
    ignored |= {"bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"}
    received, expected = checkpoint.config.to_dict(), reference.config.to_dict()
    if expected.get("head_dim") is None:  # Qwen2Config states none
        expected["head_dim"] = tiny_gguf.HIDDEN // tiny_gguf.HEADS
    for key in (received.keys() | expected.keys()) - ignored:
        assert received.get(key) == expected.get(key), key


def test_eager_model_computes_what_transformers_does(path: Path) -> None:
    tiny_gguf.write(path, kind=Q8_0)
    ids = torch.arange(20)[None]
    reference = reference_model(path).eval()
    reference.set_attn_implementation("eager")
    received = open_checkpoint(path).load_eager()(ids).logits
    torch.testing.assert_close(received, reference(ids).logits, rtol=0, atol=0)


def test_header_is_what_the_library_reads(path: Path) -> None:
    tiny_gguf.write(path, kind=Q4_1)
    file, reader = read_gguf(path), GGUFReader(path)
    stated = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    assert file.metadata == stated
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)


def test_head_size_is_read_where_transformers_assumes_it(path: Path) -> None:
    """A qwen3 whose heads are not as wide as the class's default, 128."""
    weights = tiny_gguf.write(path, "qwen3", head_dim=32)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.head_dim == 32
    for name, value in checkpoint.load_eager().named_parameters():
        np.testing.assert_array_equal(value.numpy(), weights[name], err_msg=name)


# Refusals


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type = 'yarn'"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.attention.sliding_window": 64}, "sliding_window = 64"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"llama.attention.key_length": 32}, "16 rotary dimensions in heads of 32"),
        ({"llama.attention.value_length": 8}, "rotary dimensions"),
    ],
)
def test_features_that_are_not_carried(path: Path, metadata: dict[str, Any], message: str) -> None:
    tiny_gguf.write(path, metadata=metadata)
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_qkv.weight", "blk.0.ffn_sub_norm"]
)
def test_tensors_that_are_not_carried(path: Path, name: str) -> None:
    tiny_gguf.write(path, extra={name: np.ones(8, np.float32)})
    with pytest.raises(UnsupportedModel, match=name):
        open_checkpoint(path)


def test_other_architectures_are_refused_by_name(path: Path) -> None:
    tiny_gguf.write(path, general_architecture="gemma2")
    with pytest.raises(UnsupportedModel, match=r"'gemma2'.*llama, qwen2, qwen3"):
        open_checkpoint(path)


@pytest.mark.parametrize("keep", [2, 20, 600, 20_000, -64])
def test_truncated_files(path: Path, keep: int) -> None:
    tiny_gguf.write(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated or foreign"):
        open_checkpoint(path)


def test_foreign_and_missing_files(path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(path)
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(CheckpointError, match="no GGUF magic"):
        open_checkpoint(path)


def test_damaged_count_does_not_allocate(path: Path) -> None:
    tiny_gguf.write(path)
    data = bytearray(path.read_bytes())
    data[24:32] = b"\xff" * 8  # the length of the first key
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="a count of"):
        open_checkpoint(path)


# Text


def test_special_tokens_and_template(path: Path, tmp_path: Path) -> None:
    tiny_gguf.write(path)
    checkpoint = open_checkpoint(path)
    special = checkpoint.special_tokens()
    assert special.bos_token_id == 256
    assert special.eos_token_ids == (256, 257)  # stated, and <|im_end|> by its text
    checkpoint.save_tokenizer(tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", ",  12", [",", "ĠĠ", "1", "2"]),
        ("gpt-2", "the  and", ["t", "he", "Ġ", "Ġ", "and"]),
        ("qwen2", "a\n\n12", ["a", "Ċ", "Ċ", "1", "2"]),
        ("llama-bpe", " the<|im_end|> and", ["Ġthe", "<|im_end|>", "Ġ", "and"]),
    ],
)
def test_known_splits(path: Path, pre: str, text: str, expected: list[str]) -> None:
    tiny_gguf.write(path, pre=pre)
    tokenizer = open_checkpoint(path).text_files().tokenizer
    encoded = tokenizer.encode(text)
    assert encoded.tokens == expected
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == len(tokens())


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_splits_are_those_of_transformers(path: Path, pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    from export.gguf_tokenizer import _SPLITS

    assert _SPLITS[pre] == GGUF_PRE_TOKENIZER_SPLITS[pre]


@pytest.mark.parametrize("pre", ["default", "nonesuch"])
def test_unknown_splits_are_refused_by_name(path: Path, pre: str) -> None:
    tiny_gguf.write(path, pre=pre)
    with pytest.raises(UnsupportedModel, match=f"tokenizer.ggml.pre '{pre}'"):
        open_checkpoint(path).text_files()


def test_begin_token_is_added_where_the_file_says_so(path: Path) -> None:
    tiny_gguf.write(path, metadata={"tokenizer.ggml.add_bos_token": True})
    tokenizer = open_checkpoint(path).text_files().tokenizer
    assert tokenizer.encode("a").tokens == ["<|begin|>", "a"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


# The example model


@pytest.mark.model
def test_example_tokenizer_and_identity(example_gguf: Path) -> None:
    checkpoint = open_checkpoint(example_gguf)
    assert checkpoint.sha256() == EXAMPLE_SHA256
    assert checkpoint.special_tokens().eos_token_ids[0] == 2
    tokenizer = checkpoint.text_files().tokenizer
    assert tokenizer.encode(",  1").tokens == [",", "ĠĠ", "1"]
    chat = "<|im_start|>user\nHi there, 2024!<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(chat).ids, skip_special_tokens=False) == chat


@pytest.mark.slow
@pytest.mark.model
def test_example_tensors_are_those_of_transformers(example_gguf: Path) -> None:
    assert_bit_equal(open_checkpoint(example_gguf), reference_model(example_gguf))
