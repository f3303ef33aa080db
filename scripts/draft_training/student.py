"""The draft: some of the target's own layers, its embedding, and a head over fewer tokens."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .errors import TargetError


def choose_layers(total: int, count: int) -> tuple[int, ...]:
    """The first half of ``count`` from the bottom, the rest from the top.

    The bottom layers read tokens and the top ones write logits; the middle is what a draft can
    best do without.

    Raises:
        TargetError: ``count`` isn't within 1 to ``total``.
    """
    if not 1 <= count <= total:
        raise TargetError(
            f"--layers: received {count}. Expected 1 to {total}, the layers of the target."
        )
    low = (count + 1) // 2
    return (*range(low), *range(total - (count - low), total))


def check_layers(total: int, ids: Sequence[int]) -> tuple[int, ...]:
    """Reject layers which the target hasn't got."""
    wrong = [i for i in ids if not 0 <= i < total]
    if wrong or not ids:
        raise TargetError(
            f"--layer-ids: received {','.join(map(str, ids)) or 'nothing'}. Expected ids from 0 "
            f"to {total - 1}, the {total} layers of the target."
        )
    return tuple(ids)


def draft_config(target: PretrainedConfig, layer_ids: Sequence[int]) -> PretrainedConfig:
    """The target's config, cut down to ``layer_ids``."""
    config = copy.deepcopy(target)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layer_ids]
    config.num_hidden_layers = len(layer_ids)
    config.tie_word_embeddings = False
    return config


class Student(nn.Module):
    """A trainable draft. The embedding stays the target's and is never trained."""

    def __init__(
        self, target: PreTrainedModel, layer_ids: Sequence[int], vocabulary: torch.Tensor
    ) -> None:
        """Cut the draft out of ``target``.

        Args:
            vocabulary: the draft vocabulary as target ids. # [D] i64
        """
        super().__init__()
        base = target.base_model
        self.model = type(base)(draft_config(target.config, layer_ids)).float()
        self.model.embed_tokens = base.embed_tokens  # before the rest: frees the random one
        for mine, theirs in zip(self.model.layers, layer_ids, strict=True):
            mine.load_state_dict(base.layers[theirs].state_dict())
        self.model.norm.load_state_dict(base.norm.state_dict())
        head = target.get_output_embeddings().weight[vocabulary]
        self.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        self.lm_head.weight.data.copy_(head)
        self.model.embed_tokens.requires_grad_(False)

    def forward(
        self,
        tokens: torch.Tensor,  # [batch, length] i64
        positions: torch.Tensor,  # [scored] i64, into batch x length
    ) -> torch.Tensor:
        """Logits over the draft vocabulary at ``positions``. # [scored, D] f32"""
        hidden = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        return self.lm_head(hidden.flatten(0, 1)[positions])

    def own_state(self) -> dict[str, torch.Tensor]:
        """Every tensor but the shared embedding, under the names of the published file."""
        return {k: v for k, v in self.state_dict().items() if "embed_tokens" not in k}

    def begin_from(self, draft: Path, vocabulary: torch.Tensor) -> None:
        """Take the weights of an earlier draft of the same layers and tokens.

        Raises:
            TargetError: it's another kind of draft.
        """
        try:
            tensors = load_file(draft / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise TargetError(
                f"--start: {draft}: {error}. Expected a directory which this script wrote."
            ) from error
        d2t = tensors.pop("d2t", torch.zeros(0))
        tensors.pop("t2d", None)
        shapes = {name: tuple(value.shape) for name, value in self.own_state().items()}
        same = {name: tuple(value.shape) for name, value in tensors.items()} == shapes
        ids = torch.arange(len(d2t)) + d2t
        if not same or not torch.equal(ids, vocabulary):
            raise TargetError(
                f"--start: {draft}: received a draft of other layers or other tokens. Expected "
                "one from the same text with the same --layer-ids and --draft-vocab."
            )
        self.load_own_state({name: value.float() for name, value in tensors.items()})

    def load_own_state(self, state: dict[str, torch.Tensor]) -> None:
        missing, unexpected = self.load_state_dict(state, strict=False)
        missing = [name for name in missing if "embed_tokens" not in name]
        if missing or unexpected:
            raise RuntimeError(f"checkpoint mismatch: missing {missing}, unexpected {unexpected}")


def distillation_loss(
    logits: torch.Tensor,  # [scored, D] f32
    top_ids: torch.Tensor,  # [scored, TOP] i64
    top_p: torch.Tensor,  # [scored, TOP] f32
    overlap_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix KL(p, q) with the total variation distance 1 - sum(min(p, q)).

    The KL has a gradient wherever the draft is wrong and so learns fast; the overlap is the
    chance that the draft's token is accepted (Leviathan et al., corollary 3.6) and so is what
    counts at the end.

    Returns:
        The mean loss and the mean overlap, scalars.
    """
    log_q = logits.gather(1, top_ids) - logits.logsumexp(1, keepdim=True)
    p = top_p / top_p.sum(1, keepdim=True)
    kl = (p * (p.clamp_min(1e-9).log() - log_q)).sum(1).mean()
    overlap = torch.minimum(top_p, log_q.exp()).sum(1).mean()
    return (1 - overlap_weight) * kl + overlap_weight * (1 - overlap), overlap.detach()


@torch.inference_mode()
def predict(student: Student, ids: torch.Tensor) -> torch.Tensor:
    """q after every token of ``ids`` ([length] i64). # [length, D] f32"""
    return F.softmax(student(ids[None], torch.arange(len(ids))), -1)
