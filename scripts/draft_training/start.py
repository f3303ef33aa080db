"""A linear head in closed form, so that training begins from a draft which already works.

Drafting from features is nearly linear: the target's next final state follows from its last one
and the next token's embedding. Three least-squares fits on some of the text give such a head:

    fc       features of token t -> g, the target's final state at token t
    v, o     (embedding of token t + 1, g) -> what turns g into the final state at token t + 1
    q, k     the same -> 1

The last one makes some attention heads look at their own pair, whatever it holds: under RoPE a
constant query and a constant key agree best at distance 0. A draft step's state is then the next
step's g, whichever step it is. The other heads and the MLP begin as the target's last ones, silent.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from .eagle import Attention, EagleHead, HeadShape
from .features import TAPS
from .training import Row

OWN_SHARE = 2 / 3  # of the attention heads, which look at their own pair
FASTEST = 6  # pairs of rotating dimensions that tell distance 0 from the others
SHARPNESS = 5.5  # of the attention's logit, from each of them
RIDGE = 1e-3  # of the regressors' variance
# Adam moves every weight alike, so weights are made large where a small change would be felt.
NORM_WEIGHT = 0.25  # of what q, k and v read
STATE_SCALE = 16.0  # of the residual stream; every reader normalises it


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Consecutive tokens t and t + 1, without the first of a text: its states are outliers."""

    features: torch.Tensor  # of t, [samples, TAPS * H] f32
    state: torch.Tensor  # of t, behind the final norm, [samples, H] f32
    following: torch.Tensor  # of t + 1
    embedded: torch.Tensor  # t + 1, [samples, H] f32


def samples(rows: Iterable[Row], embedding: torch.Tensor) -> Samples:
    """Every sample of ``rows``, which hold ids and states."""
    parts = [(row["states"][1:-1], row["states"][2:, TAPS], row["ids"][2:]) for row in rows]
    states, following, ids = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Samples(
        features=torch.from_numpy(states[:, :TAPS].astype(np.float32)).flatten(1),
        state=torch.from_numpy(states[:, TAPS].astype(np.float32)),
        following=torch.from_numpy(following.astype(np.float32)),
        embedded=F.embedding(torch.from_numpy(ids.astype(np.int64)), embedding),
    )


def fit(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The ridge regression of ``y`` on ``x``, whose columns are of about one scale. # [out, in]"""
    gram = (x.T @ x).double() / len(x)
    gram += RIDGE * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(gram, (x.T @ y).double() / len(x)).float().T


@torch.no_grad()
def linear_start(head: EagleHead, target: PreTrainedModel, rows: Iterable[Row]) -> None:
    """Set ``head`` to the linear one, and what that leaves free to the target's last layer."""
    base, layer = target.base_model, head.midlayer
    _borrow(head, target)
    drawn = samples(rows, base.embed_tokens.weight)
    scale = base.norm.weight
    head.feature_scale.copy_(drawn.features.pow(2).mean(0).sqrt())
    features = drawn.features / head.feature_scale
    head.fc.weight.copy_(STATE_SCALE * fit(features, drawn.state / scale))
    g = head.fc(features)
    for norm in (layer.hidden_norm, layer.input_layernorm):
        norm.weight.fill_(NORM_WEIGHT)
    joined = layer.joined(drawn.embedded, g)
    wanted = STATE_SCALE * drawn.following / scale - g
    step = _reduced(fit(joined, wanted), joined, _own_width(layer.shape))
    _own_values(layer.self_attn, *step)
    _own_pair(layer.self_attn, fit(joined, torch.ones(len(joined), 1))[0], layer.shape)
    # A shrunk prediction comes out of the norm at full length: too sure of itself.
    x = g + joined @ (step[0] @ step[1]).T
    head.norm.weight.mul_(x.pow(2).mean().sqrt() / STATE_SCALE)


def _borrow(head: EagleHead, target: PreTrainedModel) -> None:
    """The target's last attention and MLP, the way out of either silenced."""
    last, mine = target.base_model.layers[-1], head.midlayer.self_attn
    head.midlayer.mlp.load_state_dict(last.mlp.state_dict())
    head.midlayer.mlp.down_proj.weight.zero_()
    head.midlayer.post_attention_layernorm.load_state_dict(
        last.post_attention_layernorm.state_dict()
    )
    mine.o_proj.weight.zero_()
    shape = head.midlayer.shape
    for name in ("q_proj", "k_proj", "v_proj"):
        theirs = getattr(last.self_attn, name).weight.unflatten(0, (-1, shape.head_dim))
        theirs = theirs.repeat_interleave(shape.heads // len(theirs), 0).flatten(0, 1)
        getattr(mine, name).weight.zero_()[:, shape.hidden :] = theirs


def _own_width(shape: HeadShape) -> int:
    return round(shape.heads * OWN_SHARE) * shape.head_dim


def _reduced(weight: torch.Tensor, x: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best factors of ``weight`` on ``x``. # [out, rank], [rank, in]"""
    y = x @ weight.T
    _, directions = torch.linalg.eigh((y.T @ y).double())  # ascending
    out = directions[:, -rank:].float()
    return STATE_SCALE * out, out.T @ weight / STATE_SCALE


def _own_values(attention: Attention, out: torch.Tensor, value: torch.Tensor) -> None:
    attention.v_proj.weight[: len(value)] = value
    attention.o_proj.weight[:, : len(value)] = out


def _own_pair(attention: Attention, constant: torch.Tensor, shape: HeadShape) -> None:
    """Let the first heads' queries and keys be the same constant vector.

    Args:
        constant: what gives 1 on any pair. # [2H] f32
    """
    vector = torch.zeros(shape.head_dim)
    vector[: min(FASTEST, shape.head_dim // 2)] = (SHARPNESS * shape.head_dim**0.5) ** 0.5
    rows = (vector[:, None] * constant).repeat(round(shape.heads * OWN_SHARE), 1)
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).weight[: len(rows)] = rows
