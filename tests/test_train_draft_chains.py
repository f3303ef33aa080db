"""The EAGLE-3 head in training: its chains equal a decoder's, and its labels are theirs."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from draft_training import chains, eagle, features, medusa, training

VOCAB, DRAFT_VOCAB, HIDDEN = 120, 64, 32


@pytest.fixture
def head() -> eagle.EagleHead:
    """Random weights, so large that every part of the forward pass is felt."""
    torch.manual_seed(7)
    shape = eagle.HeadShape(
        hidden=HIDDEN, heads=4, head_dim=8, intermediate=48, epsilon=1e-5, theta=1e4
    )
    made = eagle.EagleHead(shape, torch.randn(VOCAB, HIDDEN), draft_vocab=DRAFT_VOCAB)
    for name, parameter in made.named_parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in name else parameter.data.mul_(2)
    made.feature_scale.uniform_(0.5, 2)
    return made


def random_rows(lengths: tuple[int, ...] = (10, 14)) -> list[training.Row]:
    rng = np.random.default_rng(3)
    return [
        {
            "ids": rng.integers(0, VOCAB, n, dtype=np.int32),
            "prompt": np.int32(3),
            "states": rng.normal(size=(n, features.TAPS + 1, HIDDEN)).astype(np.float16),
            "top_ids": np.stack([rng.permutation(DRAFT_VOCAB)[:8] for _ in range(n)]),
            "top_p": rng.dirichlet(np.ones(8), n).astype(np.float16),
        }
        for n in lengths
    ]


class Decoder:
    """An EAGLE-3 decoder with a cache, from the published tensors alone and one pair at a time."""

    def __init__(self, head: eagle.EagleHead) -> None:
        self.weights, self.embedding = head.published(), head.embedding
        self.shape = head.midlayer.shape
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def read(self, token: int, g: torch.Tensor, position: int) -> torch.Tensor:
        """Take one pair into the cache and return its state before the norm. # [H]"""
        w, layer = self.weights, "midlayer."
        pair = torch.cat(
            [
                self._norm(self.embedding[token], layer + "input_layernorm"),
                self._norm(g, layer + "hidden_norm"),
            ]
        )
        q, k, v = (self._heads(w[f"{layer}self_attn.{n}_proj.weight"] @ pair) for n in "qkv")
        self.keys.append(self._turn(k, position))
        self.values.append(v)
        keys, values = torch.stack(self.keys, 1), torch.stack(self.values, 1)
        scores = (keys @ self._turn(q, position)[..., None])[..., 0] / self.shape.head_dim**0.5
        mixed = (scores.softmax(-1)[:, None] @ values).flatten()
        x = g + w[layer + "self_attn.o_proj.weight"] @ mixed
        y = self._norm(x, layer + "post_attention_layernorm")
        gate, up, down = (w[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return x + down @ (F.silu(gate @ y) * (up @ y))

    def fuse(self, states: np.ndarray) -> torch.Tensor:
        """The feature of one token. # [H]"""
        taps = torch.from_numpy(states[: features.TAPS].astype(np.float32)).flatten()
        return self.weights["fc.weight"] @ taps

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean() + self.shape.epsilon).rsqrt()
        return x * scale * self.weights[name + ".weight"]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self.shape.heads, self.shape.head_dim)

    def _turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """RoPE by complex numbers: dimension f and f + half are one number."""
        half = self.shape.head_dim // 2
        angle = position * self.shape.theta ** (-torch.arange(half) / half)
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angle)
        return torch.cat([turned.real, turned.imag], 1)


def decoded(head: eagle.EagleHead, row: training.Row, pair: int, steps: int) -> torch.Tensor:
    """The states of a chain from ``pair`` on, teacher-forced. # [steps, H]"""
    decoder = Decoder(head)
    for i in range(pair + 1):
        x = decoder.read(row["ids"][i + 1], decoder.fuse(row["states"][i]), i)
    chain = [x]
    for step in range(1, steps):
        chain.append(decoder.read(row["ids"][pair + 1 + step], chain[-1], pair + step))
    return torch.stack(chain)


def largest_gap(head: eagle.EagleHead, rows: list[training.Row]) -> float:
    """Between training's states and a decoder's, over every scored pair and step."""
    options = training.TrainOptions(epochs=1, prompt_share=0.5)
    batch = chains.collate_chains(rows, 0.0, options, np.random.default_rng(1))
    begins = np.cumsum([0, *(len(row["ids"]) for row in rows)])
    with torch.inference_mode():
        states, worst = head(batch.packed), 0.0
        for step, (step_states, at) in enumerate(zip(states, batch.packed.steps, strict=True)):
            assert len(at.index), "nothing was compared"
            for state, flat in zip(step_states, at.index.tolist(), strict=True):
                which = int(np.searchsorted(begins, flat, side="right")) - 1
                expected = decoded(head, rows[which], flat - begins[which], step + 1)[step]
                worst = max(worst, ((state - expected).norm() / expected.norm()).item())
    return worst


def test_training_equals_decoding(head: eagle.EagleHead) -> None:
    assert largest_gap(head, random_rows()) < 1e-4  # f32, two orders of sums


@pytest.mark.parametrize("fault", ["position", "token", "own row", "leak"])
def test_a_planted_fault_is_seen(
    head: eagle.EagleHead, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above fails when training is off by one somewhere."""
    rotate, attend, beside = eagle.rotate, eagle.attend, eagle.EagleHead._beside
    if fault == "position":  # of every query, against its keys
        queries = eagle.MidLayer.queries
        monkeypatch.setattr(
            eagle.MidLayer, "queries", lambda self, joined, at: queries(self, joined, at + 1)
        )
    elif fault == "token":  # of the later steps
        monkeypatch.setattr(
            eagle.EagleHead, "_beside", lambda self, b, at, step: beside(self, b, at, 0)
        )
    elif fault == "own row":  # a step that doesn't see its own pair
        monkeypatch.setattr(
            eagle, "attend", lambda q, true, chain, *rest: attend(q, true, chain[:-1], *rest)
        )
    else:  # chains which see the next true feature
        monkeypatch.setattr(eagle, "attend", _seeing_ahead(attend))
    assert rotate is eagle.rotate
    assert largest_gap(head, random_rows()) > 1e-2


def _seeing_ahead(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def leaky(q, true, chain, batch, at):  # type: ignore[no-untyped-def]
        later = torch.clamp(at.index + 1, max=len(batch.tokens) - 1)
        return attend(q, true, chain, batch, eagle.Pairs(index=later, counts=at.counts))

    return leaky


def test_labels_belong_to_the_token_that_is_predicted() -> None:
    """Each label is that of its own row: pair i at step j has row i + 1 + j's."""
    rows = random_rows()
    for row in rows:
        row["top_ids"] = np.repeat(row["ids"][:, None], 8, 1)  # marks each row by its token
    rng, options = np.random.default_rng(1), training.TrainOptions(epochs=1)
    batch = chains.collate_chains(rows, 0.0, options, rng)
    for step, (at, label) in enumerate(zip(batch.packed.steps, batch.labels, strict=True)):
        expected = batch.packed.tokens[at.index + 1 + step]
        assert torch.equal(label.top_ids[:, 0], expected)
        ends = np.cumsum([len(row["ids"]) for row in rows])
        owner = np.searchsorted(ends, at.index.numpy(), side="right")
        assert (at.index.numpy() + 2 + step < ends[owner]).all(), "within its conversation"
    states = medusa.collate_states(rows, 0.0, options, np.random.default_rng(1))
    flat = np.concatenate([row["states"][:, features.TAPS] for row in rows]).astype(np.float32)
    tokens = np.concatenate([row["ids"] for row in rows])
    for step, (some, label) in enumerate(zip(states.states, states.labels, strict=True)):
        found = [int(np.flatnonzero((flat == s).all(1))[0]) for s in some.numpy()]
        assert label.top_ids[:, 0].tolist() == tokens[np.array(found) + 1 + step].tolist()
