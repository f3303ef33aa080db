"""A draft speaks its target's tokens, or is refused with the first that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import VOCAB, edit_json, llama_config, save, tokenizer, tokens

from export.checkpoint import Checkpoint, open_checkpoint
from export.draft import open_draft
from export.vocabulary import check_vocabularies, read_draft_map
from runtime.errors import CheckpointError, VocabularyMismatch

KEPT = np.array([0, 3, 4, 9, 31, 256, 257])  # target ids that the distilled draft proposes


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("target") / "target"
    save(directory, llama_config(num_hidden_layers=3, tie_word_embeddings=True))
    return open_checkpoint(directory)


# Token by token


def sizes(target: int, draft: int) -> dict[str, int]:
    return {"target_size": target, "draft_size": draft}


def test_padding_is_tolerated_both_ways() -> None:
    """As Qwen2.5's 151,936 and 152,064 rows (bugs 16); and a tokenizer that names some padding."""
    own, padded = tokenizer(), tokenizer([*tokens(), "<extra0>", "<extra1>"])
    check_vocabularies(own, own, **sizes(152_064, 151_936))
    check_vocabularies(own, padded, **sizes(VOCAB, VOCAB))
    check_vocabularies(padded, own, **sizes(VOCAB, VOCAB))


def test_first_differing_token_is_named() -> None:
    names = tokens()
    names[270], names[275] = names[275], names[270]
    with pytest.raises(VocabularyMismatch) as caught:
        check_vocabularies(tokenizer(), tokenizer(names), **sizes(300, 288))
    for part in ("288 rows", "300 rows", "token 270", repr(names[270]), repr(names[275])):
        assert part in str(caught.value)


def test_vocabularies_with_nothing_in_common() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    with pytest.raises(VocabularyMismatch, match="empty"):
        check_vocabularies(tokenizer(), Tokenizer(BPE()), **sizes(300, 0))


# An ordinary checkpoint as a draft


def test_ordinary_draft(target: Checkpoint, tmp_path: Path) -> None:
    """Another hidden size and more padding are no obstacle."""
    save(tmp_path, llama_config(hidden_size=16, num_hidden_layers=1, vocab_size=VOCAB + 64))
    draft = open_draft(tmp_path, target)
    assert (draft.vocab_size, draft.d2t, draft.borrowed_embedding) == (VOCAB + 64, None, None)


def test_ordinary_draft_of_another_vocabulary(target: Checkpoint, tmp_path: Path) -> None:
    save(tmp_path, llama_config())
    names = tokens()
    names[5], names[6] = names[6], names[5]
    tokenizer(names).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(VocabularyMismatch, match="token 5 is"):
        open_draft(tmp_path, target)


# A distilled draft


def distilled(directory: Path, kept: np.ndarray = KEPT, **config: Any) -> Path:
    """As scripts/train_draft.py writes it: no embedding, a small head, d2t and t2d, float16."""
    save(directory, llama_config(num_hidden_layers=1, **config), dtype=torch.float16)
    path = directory / "model.safetensors"
    state = load_file(path)
    state.pop("model.embed_tokens.weight")
    state["lm_head.weight"] = state["lm_head.weight"][: len(kept)].clone()
    state["d2t"] = torch.from_numpy(kept - np.arange(len(kept)))
    state["t2d"] = torch.isin(torch.arange(VOCAB), torch.from_numpy(kept))
    save_file(state, path)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    outrider = {"kind": "distilled-draft", "target_vocab_size": VOCAB}
    edit_json(directory / "config.json", draft_vocab_size=len(kept), outrider=outrider)
    return directory


def change(directory: Path, **tensors: torch.Tensor | None) -> Path:
    path = directory / "model.safetensors"
    state = {k: v for k, v in (load_file(path) | tensors).items() if v is not None}
    save_file(state, path)
    return directory


def test_distilled_draft(target: Checkpoint, tmp_path: Path) -> None:
    draft = open_draft(distilled(tmp_path), target)
    assert draft.borrowed_embedding == "model.embed_tokens.weight"
    assert draft.vocab_size == len(KEPT)
    assert draft.d2t is not None
    np.testing.assert_array_equal(draft.d2t + np.arange(len(KEPT)), KEPT)
    assert not {"d2t", "t2d"} & draft.checkpoint.names()
    embedding = "model.embed_tokens.weight"
    np.testing.assert_array_equal(draft.checkpoint.load(embedding), target.load(embedding))


def test_distilled_draft_computes(target: Checkpoint, tmp_path: Path) -> None:
    """One layer, the target's embedding and the small head, put together by hand."""
    draft = open_draft(distilled(tmp_path), target)
    ids = torch.arange(9)[None]
    model = draft.load_eager()
    hidden = model.model(ids).last_hidden_state
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"].float()
    embedded = torch.from_numpy(target.load("model.embed_tokens.weight"))
    torch.testing.assert_close(model.model.embed_tokens.weight, embedded, rtol=0, atol=0)
    torch.testing.assert_close(model(ids).logits, hidden @ head.T)


def test_hidden_sizes_are_both_named(target: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"hidden size 16.*Expected 32.*target"):
        open_draft(distilled(tmp_path, hidden_size=16), target)


def test_draft_for_another_target(target: Checkpoint, tmp_path: Path) -> None:
    distilled(tmp_path)
    edit_json(tmp_path / "config.json", outrider={"target_vocab_size": VOCAB + 1})
    with pytest.raises(VocabularyMismatch, match=f"{VOCAB + 1} tokens.*{VOCAB}"):
        open_draft(tmp_path, target)


OFFSETS = torch.from_numpy(KEPT - np.arange(len(KEPT)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": None}, "t2d but no d2t"),
        ({"d2t": None, "t2d": None}, "7 tokens and no d2t"),
        ({"d2t": OFFSETS[:-1]}, "6 entries. Expected 7"),
        ({"d2t": OFFSETS + 50}, "target token 306 for draft token 5|target token 300"),
        ({"d2t": OFFSETS.flip(0)}, "ascending|target token"),
        ({"d2t": OFFSETS.float()}, "float32"),
        ({"d2t": OFFSETS + 1}, "target token 0"),
        ({"t2d": torch.ones(VOCAB - 1, dtype=torch.bool)}, r"\[299\]. Expected \[300\]"),
        ({"lm_head.weight": None}, "no lm_head.weight"),
    ],
)
def test_maps_that_do_not_fit(
    target: Checkpoint, tmp_path: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    directory = change(distilled(tmp_path), **tensors)
    with pytest.raises(CheckpointError, match=message):
        open_draft(directory, target)


def test_no_map_means_equal_ids(target: Checkpoint) -> None:
    assert read_draft_map(target.tensors, target_size=VOCAB) is None


def test_target_without_an_embedding_to_lend(target: Checkpoint, tmp_path: Path) -> None:
    lender = open_checkpoint(distilled(tmp_path / "lender"))
    with pytest.raises(CheckpointError, match="none to share"):
        open_draft(distilled(tmp_path / "draft"), lender)


def test_configuration_keeps_what_the_trainer_wrote(target: Checkpoint, tmp_path: Path) -> None:
    draft = open_draft(distilled(tmp_path), target)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert draft.checkpoint.config.outrider == stated["outrider"]
