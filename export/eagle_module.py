"""An EAGLE head as a torch module: the eager reference, and what is traced.

Parameters carry the canonical names of `export.eagle_head`. Layers are transformers' own, but for
the projections of EAGLE-3, which read the embedding and the state side by side.

EAGLE-3 (arXiv 2503.01840, section 3.1), with e the embedding of a row's token and g its state:

    x = g + attention(input_layernorm(e) ‖ hidden_norm(g));  x += mlp(post_attention_layernorm(x))
    logits = lm_head(norm(x)), the row's own state is x

EAGLE-1 and -2 (arXiv 2401.15077, section 4.1): g is the target's state behind its last norm,

    y = fc(e ‖ g);  x = y + attention(y);  x += mlp(post_attention_layernorm(x))
    logits = lm_head(x), and the row's own state is x
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from .eagle_head import EagleHead


@dataclass(frozen=True, kw_only=True)
class _Family:
    attention: type[nn.Module]
    mlp: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


_FAMILIES = {
    "llama": _Family(
        attention=llama.LlamaAttention,
        mlp=llama.LlamaMLP,
        norm=llama.LlamaRMSNorm,
        rotary=llama.LlamaRotaryEmbedding,
    ),
    "qwen3": _Family(
        attention=qwen3.Qwen3Attention,
        mlp=qwen3.Qwen3MLP,
        norm=qwen3.Qwen3RMSNorm,
        rotary=qwen3.Qwen3RotaryEmbedding,
    ),
}


class EagleModule(nn.Module):
    """Token ids and states in; logits of the last row, and the rows' own states, out."""

    def __init__(self, head: EagleHead, rotary: nn.Module) -> None:
        """rotary: made by `make_rotary`, with real frequencies also where all else is fake."""
        super().__init__()
        self.config = head.config
        size, table = head.config.hidden_size, head.shapes()["embed_tokens.weight"]
        self.embed_tokens = nn.Embedding(*table)
        self.fc = None
        if head.version == 1:
            self.fc = nn.Linear(2 * size, size, bias="fc.bias" in head.shapes())
        self.layers = nn.ModuleList([_Layer(head)])
        self.norm = _norm(head.config) if "norm.weight" in head.shapes() else None
        self.lm_head = nn.Linear(size, head.vocab_size, bias=False)
        self.rotary = rotary
        self.norm_output = head.norm_output

    def forward(
        self,
        input_ids: Tensor,  # [batch, rows] i64
        states: Tensor,  # [batch, rows, H]
        positions: Tensor,  # [batch, rows] i64
        wanted: Tensor | None = None,  # [n] i64, rows to project; None: the last
    ) -> tuple[Tensor, Tensor]:
        """Logits [batch, n, D] of the wanted rows; states [batch, rows, H]."""
        embedded = self.embed_tokens(input_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=torch.ones_like(input_ids),
            cache=None,
            position_ids=positions,
        )
        if self.fc is not None:
            states = self.fc(torch.cat([embedded, states], dim=-1))
        x = self.layers[0](embedded, states, self.rotary(states, positions), mask)
        normed = self.norm(x) if self.norm is not None else x
        last = normed[:, -1:] if wanted is None else normed[:, wanted]
        return self.lm_head(last), normed if self.norm_output else x


class _Layer(nn.Module):
    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        config, family = head.config, _FAMILIES[head.config.model_type]
        self.norm_before_residual = head.norm_before_residual
        self.self_attn = family.attention(config, layer_idx=0)
        self.mlp = family.mlp(config)
        self.post_attention_layernorm = _norm(config)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.self_attn, name, _projection(head, f"layers.0.self_attn.{name}"))
        self.joins = head.version == 3
        if self.joins:
            self.input_layernorm, self.hidden_norm = _norm(config), _norm(config)
        elif "layers.0.input_layernorm.weight" in head.shapes():
            self.input_layernorm = _norm(config)

    def forward(self, embedded: Tensor, states: Tensor, rotary: Any, mask: Any) -> Tensor:
        residual, x = states, states
        if self.joins:
            x = self.hidden_norm(states)
            residual = x if self.norm_before_residual else states
            x = torch.cat([self.input_layernorm(embedded), x], dim=-1)
        elif hasattr(self, "input_layernorm"):
            x = self.input_layernorm(x)
        x, _ = self.self_attn(hidden_states=x, position_embeddings=rotary, attention_mask=mask)
        x = residual + x
        return x + self.mlp(self.post_attention_layernorm(x))


def _projection(head: EagleHead, name: str) -> nn.Linear:
    """As wide, and with a bias or not, as the head has it: its configuration says it in part."""
    shapes = head.shapes()
    out_features, features = shapes[f"{name}.weight"]
    return nn.Linear(features, out_features, bias=f"{name}.bias" in shapes)


class FuseModule(nn.Module):
    """The target's features of a row → the state that an EAGLE-3 head starts from."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        shapes, eps = head.shapes(), head.config.rms_norm_eps
        family = _FAMILIES[head.config.model_type]
        size, width = shapes["fc.weight"]
        self.width = width
        self.input_norm = family.norm(width, eps=eps) if head.norm_before_fc else None
        self.fc_norm = None
        if head.fc_norms:
            self.part = width // len(head.taps)
            self.fc_norm = nn.ModuleList(family.norm(self.part, eps=eps) for _ in head.taps)
        self.fc = nn.Linear(width, size, bias="fc.bias" in shapes)

    def forward(self, features: Tensor) -> Tensor:
        """[batch, rows, width] → [batch, rows, H]."""
        if self.fc_norm is not None:
            parts = torch.split(features, self.part, dim=-1)
            features = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return self.fc(features)


def make_rotary(config: PretrainedConfig) -> nn.Module:
    return _FAMILIES[config.model_type].rotary(config)


def eager_module(head: EagleHead) -> EagleModule:
    """The head with its weights, in float32, on the CPU."""
    return _filled(EagleModule(with_attention(head, "eager"), make_rotary(head.config)), head)


def eager_fuse(head: EagleHead) -> FuseModule:
    return _filled(FuseModule(head), head)


def _filled(module: Any, head: EagleHead) -> Any:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(head.load(name)))
    return module.eval().requires_grad_(False)


def with_attention(head: EagleHead, name: str) -> EagleHead:
    """The same head, whose layer asks for the attention of this name."""
    config = copy.deepcopy(head.config)
    config._attn_implementation = name
    return replace(head, config=config)


def _norm(config: PretrainedConfig) -> nn.Module:
    return _FAMILIES[config.model_type].norm(config.hidden_size, eps=config.rms_norm_eps)
