"""An EAGLE-3 head's forward pass in plain torch, read off the docstring of export/eagle_head.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from export.eagle_head import EagleHead

LAYER = "layers.0."


@dataclass
class EagleReference:
    """Steps over one text; keys and values of earlier steps are kept."""

    head: EagleHead
    keys: list[torch.Tensor] = field(default_factory=list)  # each [n, kv_heads, head_dim]
    values: list[torch.Tensor] = field(default_factory=list)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """[n, 3 * target hidden] → g [n, hidden]."""
        if self.head.norm_before_fc:
            taps = self._norm("input_norm", taps)
        if self.head.fc_norms:
            parts = enumerate(taps.chunk(3, dim=-1))
            taps = torch.cat([self._norm(f"fc_norm.{j}", part) for j, part in parts], dim=-1)
        return self._linear("fc", taps)

    def step(
        self,
        ids: torch.Tensor,  # [n] target ids of the tokens after g's
        g: torch.Tensor,  # [n, hidden]
        positions: torch.Tensor,  # [n]
        visible: torch.Tensor,  # [n, every key so far and n more] bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, D], and g of the next step [n, hidden]."""
        h = self._norm(LAYER + "hidden_norm", g)
        e = self._norm(LAYER + "input_layernorm", self._weight("embed_tokens.weight")[ids])
        x = h if self.head.norm_before_residual else g
        x = x + self._attention(torch.cat([e, h], dim=-1), positions, visible)
        x = x + self._mlp(self._norm(LAYER + "post_attention_layernorm", x))
        normed = self._norm("norm", x)
        logits = normed @ self._weight("lm_head.weight").T
        return logits, normed if self.head.norm_output else x

    def _attention(
        self, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        config = self.head.config
        cos, sin = LlamaRotaryEmbedding(config)(x[None], positions[None])
        query = _rotate(self._heads("q", x), cos[0], sin[0])
        self.keys.append(_rotate(self._heads("k", x), cos[0], sin[0]))
        self.values.append(self._heads("v", x))
        groups = config.num_attention_heads // config.num_key_value_heads
        keys = torch.cat(self.keys).repeat_interleave(groups, dim=1)
        values = torch.cat(self.values).repeat_interleave(groups, dim=1)
        scores = torch.einsum("nhd,mhd->hnm", query, keys) * config.head_dim**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out = torch.einsum("hnm,mhd->nhd", weights, values).flatten(1)
        return self._linear(LAYER + "self_attn.o_proj", out)

    def _heads(self, which: str, x: torch.Tensor) -> torch.Tensor:
        """[n, heads, head_dim], normed for q and k where the layer does that."""
        name = f"{LAYER}self_attn.{which}"
        heads = self._linear(f"{name}_proj", x).unflatten(-1, (-1, self.head.config.head_dim))
        return self._norm(f"{name}_norm", heads) if self._has(f"{name}_norm.weight") else heads

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(f"{LAYER}mlp.{name}_proj", x) for name in ("gate", "up"))
        return self._linear(LAYER + "mlp.down_proj", silu(gate) * up)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.head.config.rms_norm_eps).rsqrt()
        return x * scale * self._weight(f"{name}.weight")

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self._weight(f"{name}.weight").T
        return y + self._weight(f"{name}.bias") if self._has(f"{name}.bias") else y

    def _weight(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.head.load(name))

    def _has(self, name: str) -> bool:
        return name in self.head.shapes()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[:, None] + turned * sin[:, None]
