"""The EAGLE-3 head (arXiv 2503.01840): one layer that reads the target's features.

Pair i is the feature g_i of token i beside the embedding of token i + 1; it predicts token i + 2.
A drafted pair carries the head's own last state in place of a feature.

Training-time test (section 3.2 there): at step j every pair is moved on by one more token and its
g is the state which step j - 1 left at the same pair. Its attention sees what a decoder would have
in its cache: the true pairs up to i, and of each later step only the pair of its own chain. So one
causal matrix and j dot products on the diagonal stand for a chain of drafts from every position.

Invariant: ``EagleHead.forward`` at (step j, pair i) equals j drafting steps of a decoder which
started at pair i, on the same tokens; pair i + j of a chain sits at position i + j.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .errors import StateError, TargetError
from .features import TAPS


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The sizes of a head; its attention needn't group keys as the target does."""

    hidden: int
    heads: int
    head_dim: int
    intermediate: int
    epsilon: float
    theta: float

    @classmethod
    def of(cls, config: PretrainedConfig) -> "HeadShape":
        """The target's own sizes.

        Raises:
            TargetError: the published format has no place for what its layers do.
        """
        rope, act = config.rope_parameters, config.hidden_act
        if rope.get("rope_type", "default") != "default" or act != "silu":
            raise TargetError(
                f"--kind eagle3: received a target with rope {rope} and {act}. Expected plain RoPE "
                "and silu, which this trainer's head has; train another --kind for this target."
            )
        return cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            intermediate=config.intermediate_size,
            epsilon=config.rms_norm_eps,
            theta=rope["rope_theta"],
        )


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs which one step predicts from, in the order of the tokens."""

    index: torch.Tensor  # [pairs] i64, into the batch's tokens, ascending
    counts: tuple[int, ...]  # of each conversation


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Conversations laid end to end, without padding."""

    tokens: torch.Tensor  # [tokens] i64
    features: torch.Tensor  # [tokens, TAPS * H] f32
    positions: torch.Tensor  # [tokens] i64, within the token's own conversation
    lengths: tuple[int, ...]  # of the conversations
    steps: tuple[Pairs, ...]  # each step's pairs are among those of the step before


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What attention keeps of some pairs. Each # [pairs, heads, head_dim] f32"""

    keys: torch.Tensor
    values: torch.Tensor

    def at(self, index: torch.Tensor) -> "Rows":
        return Rows(keys=self.keys[index], values=self.values[index])


class Attention(nn.Module):
    """The projections, under their published names."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        inner = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, inner, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, inner, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, inner, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The head's only layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.self_attn = Attention(shape)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.mlp = Mlp(shape)

    def joined(self, embedded: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """What the projections read. # [pairs, 2H] f32"""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], -1)

    def rows(self, joined: torch.Tensor, positions: torch.Tensor) -> Rows:
        keys = self._split(self.self_attn.k_proj(joined))
        return Rows(
            keys=rotate(keys, positions, self.shape.theta),
            values=self._split(self.self_attn.v_proj(joined)),
        )

    def queries(self, joined: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(self._split(self.self_attn.q_proj(joined)), positions, self.shape.theta)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.shape.heads, self.shape.head_dim))

    def finish(self, g: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Both residual branches. # [pairs, H] f32"""
        x = g + self.self_attn.o_proj(mixed.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE in Llama's half-and-half layout. # [pairs, heads, head_dim] f32"""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = (positions[:, None] * frequency)[:, None]  # [pairs, 1, half]
    low, high = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def attend(
    queries: torch.Tensor,  # [pairs, heads, head_dim] f32
    true: Rows,  # of every token
    chain: list[Rows],  # of the steps since, each of the same pairs
    batch: Packed,
    pairs: Pairs,
) -> torch.Tensor:
    """Mix the values that each pair's decoder would see. # [pairs, heads, head_dim] f32"""
    queries = queries * queries.shape[-1] ** -0.5
    drawn = [(queries * rows.keys).sum(-1) for rows in chain]  # each [pairs, heads]
    positions, out, mine_end, token_end = batch.positions[pairs.index], [], 0, 0
    for count, length in zip(pairs.counts, batch.lengths, strict=True):
        mine, tokens = slice(mine_end, mine_end + count), slice(token_end, token_end + length)
        mine_end, token_end = mine.stop, tokens.stop
        later = batch.positions[tokens] > positions[mine, None]
        scores = queries[mine].transpose(0, 1) @ true.keys[tokens].permute(1, 2, 0)
        scores = scores.masked_fill(later, -torch.inf)  # [heads, count, length]
        scores = torch.cat([scores, *(s[mine].T[..., None] for s in drawn)], -1).softmax(-1)
        mixed = (scores[..., :length] @ true.values[tokens].transpose(0, 1)).transpose(0, 1)
        for step, rows in enumerate(chain):
            mixed = mixed + scores[..., length + step].T[..., None] * rows.values[mine]
        out.append(mixed)
    return torch.cat(out)


class EagleHead(nn.Module):
    """A trainable head under the published names. The embedding stays the target's."""

    embedding: torch.Tensor  # [V, H] f32, frozen and not saved
    feature_scale: torch.Tensor  # [TAPS * H] f32: Adam's steps suit inputs of about 1

    def __init__(self, shape: HeadShape, embedding: torch.Tensor, *, draft_vocab: int) -> None:
        super().__init__()
        self.midlayer = MidLayer(shape)
        self.fc = nn.Linear(TAPS * shape.hidden, shape.hidden, bias=False)
        self.norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.lm_head = nn.Linear(shape.hidden, draft_vocab, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("feature_scale", torch.ones(TAPS * shape.hidden))

    def forward(self, batch: Packed) -> list[torch.Tensor]:
        """The states before the norm after each of the batch's steps. # each [pairs, H] f32"""
        every = torch.arange(len(batch.tokens))
        g = self.fc(batch.features / self.feature_scale)
        joined = self.midlayer.joined(self._beside(batch, every, 0), g)
        true = self.midlayer.rows(joined, batch.positions)
        chain, states, before = list[Rows](), list[torch.Tensor](), every
        for step, pairs in enumerate(batch.steps):
            kept, before = torch.searchsorted(before, pairs.index), pairs.index
            g, chain = g[kept], [rows.at(kept) for rows in chain]
            positions = batch.positions[pairs.index] + step
            if step:
                joined = self.midlayer.joined(self._beside(batch, pairs.index, step), g)
                chain.append(self.midlayer.rows(joined, positions))
            else:
                joined = joined[kept]
            queries = self.midlayer.queries(joined, positions)
            g = self.midlayer.finish(g, attend(queries, true, chain, batch, pairs))
            states.append(g)
        return states

    def _beside(self, batch: Packed, index: torch.Tensor, step: int) -> torch.Tensor:
        """The embeddings beside these pairs; the last pair has none, and nothing sees it."""
        index = (index + 1 + step).clamp_max(len(batch.tokens) - 1)
        return F.embedding(batch.tokens[index], self.embedding)

    def own_state(self) -> dict[str, torch.Tensor]:
        """What a resumed run needs."""
        return self.state_dict()

    def published(self) -> dict[str, torch.Tensor]:
        """Every tensor under the names of the published file."""
        state = self.state_dict()
        scale = state.pop("feature_scale")
        return state | {"fc.weight": state["fc.weight"] / scale}

    def begin_from(self, directory: Path) -> None:
        """Take the tensors of a published head with the same draft vocabulary.

        Raises:
            StateError: they aren't there, or of another shape.
        """
        state = self.state_dict()
        scale = state.pop("feature_scale")
        try:
            stored = load_file(directory / "model.safetensors")
            found = {name: stored[name].float() for name in state}
            found["fc.weight"] *= scale
            self.load_state_dict(found | {"feature_scale": scale})
        except (OSError, KeyError, RuntimeError) as error:
            raise StateError(
                f"--start: {directory} isn't such a head ({error}). Expected an EAGLE-3 head that "
                "this script wrote for this target and draft vocabulary."
            ) from error

    def load_own_state(self, state: dict[str, torch.Tensor]) -> None:
        self.load_state_dict(state)


def head_from(target: PreTrainedModel, vocabulary: torch.Tensor) -> EagleHead:
    """A head with the target's norm and head rows; its layer is still random.

    Args:
        vocabulary: the draft vocabulary as target ids. # [D] i64
    """
    base, shape = target.base_model, HeadShape.of(target.config)
    head = EagleHead(shape, base.embed_tokens.weight.detach(), draft_vocab=len(vocabulary))
    head.norm.load_state_dict(base.norm.state_dict())
    head.lm_head.weight.data.copy_(target.get_output_embeddings().weight[vocabulary])
    return head
