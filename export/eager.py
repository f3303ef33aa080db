"""The eager model that a checkpoint describes, filled tensor by tensor in float32.

Used where transformers cannot read the files itself: GGUF, and drafts that borrow an embedding or
have a head of their own size.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from .checkpoint import Checkpoint
from .names import match_names


def build_eager(checkpoint: Checkpoint, head_rows: int | None = None) -> PreTrainedModel:
    """head_rows: tokens that the output head knows, where they are not the whole vocabulary.

    Raises CheckpointError where the checkpoint and its configuration do not fit.
    """
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            checkpoint.config, dtype=torch.float32, attn_implementation="eager"
        )
        if head_rows is not None:
            hidden = checkpoint.config.hidden_size
            model.set_output_embeddings(torch.nn.Linear(hidden, head_rows, bias=False))
    model.tie_weights()  # left out with the initialisation; one tensor where the model has one
    state = model.state_dict(keep_vars=True)
    matched = match_names(checkpoint, {name: tuple(value.shape) for name, value in state.items()})
    with torch.no_grad():
        for name, parameter in state.items():
            parameter.copy_(torch.from_numpy(checkpoint.load(matched[name])))
    return model
