"""Loading the target, from a Hugging Face directory or a GGUF file."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from .errors import TargetError

# A draft is a plain `norm -> head`; these would change its distribution behind our back.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def load_target(path: Path) -> PreTrainedModel:
    """Load ``path`` in f32 for inference.

    Raises:
        TargetError: nothing loadable is there, or its architecture can't be imitated.
    """
    if path.is_dir():
        source, extra = path, {}
    elif path.is_file() and path.suffix == ".gguf":
        # With the default config the weights stay quantised and can't be copied or saved.
        source = path.parent
        extra = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    else:
        raise TargetError(
            f"--target: {path} is neither a directory nor a .gguf file. Expected a Hugging Face "
            "model directory or a GGUF; give the path of the target."
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, local_files_only=True, **extra
        )
    except (OSError, ValueError) as error:
        raise TargetError(
            f"--target: {path} doesn't load ({error}). Expected a causal language model which "
            "transformers can read; check that config and weights are there."
        ) from error
    _check(model)
    model.config.architectures = [type(model).__name__]  # a GGUF doesn't say
    return model.eval().requires_grad_(False)


def _check(model: PreTrainedModel) -> None:
    base = model.base_model
    if not all(hasattr(base, name) for name in ("layers", "norm", "embed_tokens")):
        raise TargetError(
            f"--target: {type(model).__name__} has no layers/norm/embed_tokens. Expected a "
            "Llama-like decoder; this trainer can't cut a draft from it."
        )
    for name in _LOGIT_TRANSFORMS:
        value = getattr(model.config, name, None)
        if value not in (None, 1, 1.0):
            raise TargetError(
                f"--target: {name}={value}. Expected logits = head(norm(x)); drafts of targets "
                "which transform their logits aren't supported."
            )


def special_ids(model: PreTrainedModel) -> Iterator[int]:
    """The begin, end and padding ids which the model's two configs name."""
    for config in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(config, name, None)
            yield from value if isinstance(value, list) else [] if value is None else [value]
