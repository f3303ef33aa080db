#!/usr/bin/env python
"""Train a small target whose layers can be left out, to see layer-skip drafts at work.

    python scripts/train_layer_dropout.py --out build/layer-dropout

Half of the steps drop layers at random, deeper ones more often (Elhoushi et al. 2024, LayerSkip),
so that the model speaks with any of them missing. It learns from Python's own library, reads
bytes and is no more than a demonstration: a model that wasn't trained so loses nearly all of its
acceptance with a few layers. Progress goes to stderr; the last line of stdout is the result.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, CONTEXT = 257, 512
END = "<|end|>"
BATCH, ROWS = 8, 96  # sequences a step, tokens of each
PEAK_RATE = 2e-3
MOST_DROPPED = 0.8  # chance of the last layer in a step that drops; the first always stays
HELD_OUT = 50_000  # characters

console = Console(stderr=True)
app = typer.Typer(add_completion=False)


def library_source() -> str:
    """The top-level modules of this Python's library, shortest first."""
    files = Path(os.__file__).parent.glob("*.py")
    texts = sorted((path.read_text(encoding="utf-8") for path in files), key=lambda t: (len(t), t))
    return "\n\n".join(texts)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def new_model(layers: int, hidden: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=hidden**-0.5,  # the usual 0.02 dwells at single letters' frequencies
        bos_token_id=VOCAB - 1,
        eos_token_id=VOCAB - 1,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data *= (2 * layers) ** -0.5
    return model


def kept_layers(count: int, generator: torch.Generator) -> list[int]:
    """All of them in half of the steps; else each but the first by chance, deeper ones less."""
    if torch.rand((), generator=generator) < 0.5:
        return list(range(count))
    chances = torch.arange(count) / (count - 1) * MOST_DROPPED
    return (torch.rand(count, generator=generator) >= chances).nonzero().flatten().tolist()


class Trainer:
    """AdamW with a warm-up and a cosine; everything random comes from one seed."""

    def __init__(self, model: LlamaForCausalLM, ids: torch.Tensor, *, steps: int, seed: int):
        self._model, self._ids, self._steps = model, ids, steps
        self._generator = torch.Generator().manual_seed(seed)
        self._layers = model.model.layers
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05
        )

    def step(self, number: int) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = PEAK_RATE * self._rate(number)
        loss = self._loss(self._batch(), kept_layers(len(self._layers), self._generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _loss(self, batch: torch.Tensor, kept: list[int]) -> torch.Tensor:
        """Of the model with these layers alone; without caches their numbers don't matter."""
        self._model.model.layers = torch.nn.ModuleList(self._layers[i] for i in kept)
        try:
            return self._model(batch, labels=batch, use_cache=False).loss
        finally:
            self._model.model.layers = self._layers

    def _batch(self) -> torch.Tensor:
        starts = torch.randint(len(self._ids) - ROWS, (BATCH,), generator=self._generator)
        return torch.stack([self._ids[s : s + ROWS] for s in starts.tolist()])

    def _rate(self, number: int) -> float:
        warm_up = min(1.0, (number + 1) / 30)
        return warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * number / self._steps)))


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    batch = ids[: len(ids) // ROWS * ROWS].reshape(-1, ROWS)[:64]
    return float(model(batch, labels=batch, use_cache=False).loss)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"eos_token": END, "bos_token": END}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))


@app.command(
    epilog="Example: python scripts/train_layer_dropout.py --out build/layer-dropout --steps 400"
)
def main(
    out: Annotated[Path, typer.Option(help="The checkpoint's directory.")],
    steps: Annotated[int, typer.Option(min=1, help="Batches of 768 tokens.")] = 400,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the target.")] = 8,
    hidden: Annotated[int, typer.Option(min=64, help="Its width, a multiple of 64.")] = 256,
    seed: Annotated[int, typer.Option(help="Of weights, batches and dropped layers.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Cores to use.")] = 1,
) -> None:
    """Train the target and save it as a Hugging Face checkpoint."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    text = library_source()
    tokenizer = byte_tokenizer()
    # Python's own library, from the shortest module on, as far as the steps reach.
    ids = torch.tensor(tokenizer.encode(text[: steps * BATCH * ROWS]).ids)
    unseen = torch.tensor(tokenizer.encode(text[-HELD_OUT:]).ids)
    model = new_model(layers, hidden)
    trainer, start = Trainer(model, ids, steps=steps, seed=seed), time.perf_counter()
    for number in range(steps):
        loss = trainer.step(number)
        if number % 20 == 0 or number == steps - 1:
            spent_s = time.perf_counter() - start
            console.print(f"step {number}: loss {loss:.2f}, {spent_s:.0f} s", highlight=False)
    save(model.eval(), tokenizer, out)
    loss = held_out_loss(model, unseen)
    print(f"{out}: {layers} layers, held-out loss {loss:.2f} nats a token")


if __name__ == "__main__":
    app()
