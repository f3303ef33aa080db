"""Writing heads in the formats in which such heads are published.

    EAGLE-3   config.json, model.safetensors: midlayer.*, fc, norm, lm_head [D, H], d2t [D], t2d [V]
    Medusa    config.json, medusa_lm_head.safetensors: {head}.0.linear.{weight, bias}

Neither repeats anything that the target has. Both directories get a model card.
"""

from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from .chain_figures import ChainFigures
from .eagle import EagleHead, HeadShape
from .export import Story, half, how_it_was_made, vocabulary_maps, write_directory
from .medusa import MedusaHeads
from .pairs import STEPS

_SAME_AS_TARGET = (
    "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "max_position_embeddings",
    "rms_norm_eps", "vocab_size",
)  # fmt: skip


def export_eagle(
    out: Path,
    head: EagleHead,
    *,
    target_config: PretrainedConfig,
    vocabulary: np.ndarray,  # [D] i64
    story: Story,
    figures: ChainFigures,
) -> None:
    """Write the directory of an EAGLE-3 head."""
    maps = vocabulary_maps(vocabulary, target_config.vocab_size)
    write_directory(
        out,
        config=eagle_config(target_config, len(vocabulary)),
        tensors=half(head.published()) | maps,
        card=_card("EAGLE-3 head", _eagle_text(len(vocabulary)), story, figures),
    )


def eagle_config(target: PretrainedConfig, draft_vocab: int) -> dict[str, object]:
    """config.json as SafeAILab/EAGLE has it: Llama's keys and the draft vocabulary."""
    shape = HeadShape.of(target)
    return {name: getattr(target, name, None) for name in _SAME_AS_TARGET} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "rope_theta": shape.theta,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target.hidden_size,
        "torch_dtype": "float16",
        "tie_word_embeddings": False,
    }


def export_medusa(out: Path, heads: MedusaHeads, *, story: Story, figures: ChainFigures) -> None:
    """Write the directory of Medusa heads."""
    write_directory(
        out,
        config={
            "medusa_num_heads": STEPS,
            "medusa_num_layers": 1,
            "base_model_name_or_path": story.target,
            "version": "2",
        },
        tensors=half(heads.own_state()),
        weights="medusa_lm_head.safetensors",
        card=_card("Medusa heads", _MEDUSA_TEXT, story, figures),
    )


def _eagle_text(draft_vocab: int) -> str:
    return f"""One layer that reads three hidden states of the target, in the published EAGLE-3
format. It began as the best linear predictor of the target's next state and was distilled on text
which the target wrote. It shares the target's embedding (not in this directory) and proposes
{draft_vocab} of its tokens: `target_id = i + d2t[i]`."""


_MEDUSA_TEXT = f"""{STEPS} heads of one layer each, in the published Medusa format (version 2: the
target's own head turns their states into tokens), distilled on text which the target wrote. Head i
guesses token t + 2 + i from the state of token t, whatever the tokens between them are."""


def _card(what: str, text: str, story: Story, figures: ChainFigures) -> str:
    drafts = " | ".join(str(step + 1) for step in range(STEPS))
    return f"""---
license: {story.licence}
tags: [speculative-decoding, draft, outrider]
---

# {what} for {story.target}

{text}

## Held-out figures

Measured on {figures.answer_tokens} answer tokens of conversations kept out of training, in f32,
against the target over its full vocabulary. Chains of {STEPS} are drafted along the text, so a
draft is measured as if those before it had been accepted.

| Figure by draft | {drafts} |
|---|{"---|" * STEPS}
| Overlap Σ min(p, q) at temperature 1, sampled text | {_cells(figures.overlap_sampled)} |
| Overlap Σ min(p, q) at temperature 1, greedy text | {_cells(figures.overlap_greedy_text)} |
| Greedy agreement, greedy text | {_cells(figures.agreement)} |

| Figure | Value |
|---|---|
| Tokens a round, {STEPS} drafted, temperature 1, sampled text (expected) \
| {figures.length_sampled:.2f} |
| Tokens a round, {STEPS} drafted, greedy, greedy text | {figures.length_greedy:.2f} |
| Target mass on the draft vocabulary (ceiling of the overlap) | {figures.vocabulary_mass:.3f} |

The held-out conversations come from the same kind of prompts as the training text; expect less on
text of another kind.

{how_it_was_made(story)}"""


def _cells(values: tuple[float, ...]) -> str:
    return " | ".join(f"{value:.3f}" for value in values)
