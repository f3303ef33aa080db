"""Writing the directory which Outrider loads as a draft.

    config.json        the target's config, cut down, plus `draft_vocab_size` and `outrider`
    model.safetensors  model.layers.*, model.norm.*, lm_head.weight [D, H], d2t [D], t2d [V]
    README.md          model card

The embedding is the target's and isn't repeated. As in EAGLE-3, target_id = i + d2t[i].
"""

import json
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from .errors import StateError
from .evaluate import DRAFT_TOKENS, Figures
from .student import Student, draft_config

_NOT_THE_DRAFTS = ("quantization_config", "_name_or_path", "_model_name_or_path")


@dataclass(frozen=True, kw_only=True)
class Story:
    """What the model card tells about the run."""

    target: str
    command: str
    text: str
    text_sha256: str
    target_sha256: str
    conversations: int
    tokens: int
    steps: int
    epochs: float
    train_minutes: float
    threads: int
    licence: str


def check_out(out: Path) -> None:
    """Refuse to mix with what is already there, before any work is done."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StateError(
            f"--out: {out} exists. Expected a new or empty directory; move that one away or "
            "give another."
        )


def export(
    out: Path,
    student: Student,
    *,
    target_config: PretrainedConfig,
    layer_ids: Sequence[int],
    vocabulary: np.ndarray,  # [D] i64
    story: Story,
    figures: Figures,
) -> None:
    """Write the draft's directory."""
    write_directory(
        out,
        config=config_dict(target_config, layer_ids, len(vocabulary)),
        tensors=draft_tensors(student, vocabulary, target_config.vocab_size),
        card=model_card(story, figures, layer_ids, len(vocabulary)),
    )


def write_directory(
    out: Path,
    *,
    config: dict[str, object],
    tensors: dict[str, torch.Tensor],
    card: str,
    weights: str = "model.safetensors",
) -> None:
    """Write ``out`` aside and move it into place."""
    check_out(out)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, part / weights, metadata={"format": "pt"})
    (part / weights).chmod(0o644)  # safetensors writes 0600
    (part / "README.md").write_text(card)
    if out.exists():
        out.rmdir()
    part.rename(out)


def config_dict(
    target: PretrainedConfig, layer_ids: Sequence[int], draft_vocab: int
) -> dict[str, object]:
    """The draft's config.json."""
    config = draft_config(target, layer_ids).to_dict()
    for name in _NOT_THE_DRAFTS:
        config.pop(name, None)
    return config | {
        "dtype": "float16",
        "draft_vocab_size": draft_vocab,
        "outrider": {
            "kind": "distilled-draft",
            "layer_ids": list(layer_ids),
            "target_vocab_size": target.vocab_size,
        },
    }


def draft_tensors(
    student: Student, vocabulary: np.ndarray, target_vocab: int
) -> dict[str, torch.Tensor]:
    """f16 weights, ``d2t`` # [D] i64 and ``t2d`` # [V] bool."""
    return half(student.own_state()) | vocabulary_maps(vocabulary, target_vocab)


def half(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.detach().half().contiguous() for k, v in weights.items()}


def vocabulary_maps(vocabulary: np.ndarray, target_vocab: int) -> dict[str, torch.Tensor]:
    """``d2t`` # [D] i64 and ``t2d`` # [V] bool."""
    ids = torch.from_numpy(vocabulary)
    kept = torch.zeros(target_vocab, dtype=torch.bool)
    kept[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": kept}


def model_card(story: Story, figures: Figures, layer_ids: Sequence[int], draft_vocab: int) -> str:
    """README.md of the draft."""
    return f"""---
license: {story.licence}
tags: [speculative-decoding, draft, outrider]
---

# Draft for {story.target}

A {len(layer_ids)}-layer draft, started from layers {", ".join(map(str, layer_ids))} of the target
and distilled on text which the target wrote. It shares the target's embedding (not in this
directory) and proposes {draft_vocab} of its tokens: `target_id = i + d2t[i]`.

## Held-out figures

Measured on {figures.answer_tokens} answer tokens of conversations kept out of training, in f32,
against the target over its full vocabulary.

| Figure | Value |
|---|---|
| Overlap Σ min(p, q) at temperature 1, sampled text | {figures.overlap_sampled:.3f} |
| Overlap Σ min(p, q) at temperature 1, greedy text | {figures.overlap_greedy_text:.3f} |
| Greedy agreement, greedy text | {figures.agreement:.3f} |
| Tokens a round, {DRAFT_TOKENS} drafted, temperature 1, sampled text (expected) \
| {figures.length_sampled:.2f} |
| Tokens a round, {DRAFT_TOKENS} drafted, greedy, greedy text | {figures.length_greedy:.2f} |
| Target mass on the draft vocabulary (ceiling of the overlap) | {figures.vocabulary_mass:.3f} |

The held-out conversations come from the same kind of prompts as the training text; expect less on
text of another kind.

{how_it_was_made(story)}"""


def how_it_was_made(story: Story) -> str:
    """The end of a model card."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"""## How it was made

```console
{story.command}
```

- Target: `{story.target}`, sha256 `{story.target_sha256}`
- Text: `{story.text}`, sha256 `{story.text_sha256}`: {story.conversations} conversations and
  {story.tokens} tokens to train on, {story.epochs:g} epochs, {story.steps} steps
- Time: {story.train_minutes:.0f} minutes of training, labelling apart, {story.threads} thread(s)
- Hardware: {_processor()}, {os.cpu_count()} logical cores
- Software: Python {platform.python_version()}, {versions}

## Licence

{story.licence}
"""


def _processor() -> str:
    """The processor's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
