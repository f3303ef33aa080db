"""A checkpoint of a real model's shape with random weights, for times that hang on sizes alone.

    python scripts/random_checkpoint.py llama-8b build/models/random-8b

It says nothing, and its draft agrees with it by chance. Weights are cut from one block of random
numbers, so that what is built of them is large and packs small; every row is another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

LLAMA3 = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "dtype": "bfloat16",
}
SHAPES: dict[str, PretrainedConfig] = {
    "llama-8b": LlamaConfig(
        **LLAMA3, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32
    ),
    "llama-1b": LlamaConfig(
        **LLAMA3,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        tie_word_embeddings=True,
    ),
    "qwen2-1.5b": Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
}
# Whole blocks of 128 weights, and no multiple of a row.
BLOCK = 128 * 7823
EOS = "<eos>"

Shapes = dict[str, tuple[int, ...]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path, help="a new directory")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if out.exists():
        parser.error(
            f"{out}: is there already. Expected a new directory; remove it or name another."
        )
    free, needed = shutil.disk_usage(_existing(out)).free, checkpoint_bytes(SHAPES[arguments.shape])
    if free < needed:
        parser.error(f"{out}: {free / 1e9:.1f} GB are free. Expected {needed / 1e9:.1f} GB.")
    count = write_checkpoint(SHAPES[arguments.shape], out)
    print(f"{out}: {count:,} random parameters", file=sys.stderr)
    return 0


def write_checkpoint(config: PretrainedConfig, out: Path) -> int:
    """Returns the number of parameters. One layer is held at a time, and `out` is complete or not
    there."""
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config.architectures = [type(_model(config)).__name__]
    config.save_pretrained(part)
    tokenizer().save(str(part / "tokenizer.json"))
    (part / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    generator, where, count = torch.Generator().manual_seed(0), {}, 0
    block = torch.randn(BLOCK, generator=generator).to(torch.bfloat16)
    for i, shapes in enumerate(_shards(config)):
        name = f"model-{i:05}.safetensors"
        tensors = {n: _tensor(shape, block, generator) for n, shape in shapes.items()}
        save_file(tensors, part / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shapes, name)
        count += sum(tensor.numel() for tensor in tensors.values())
    index = {"metadata": {}, "weight_map": where}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    part.rename(out)
    return count


def checkpoint_bytes(config: PretrainedConfig) -> int:
    sizes = (torch.Size(shape).numel() for shapes in _shards(config) for shape in shapes.values())
    return 2 * sum(sizes)


def tokenizer() -> Tokenizer:
    """One token a byte, and an end."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), EOS]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(EOS, special=True)])
    return made


def _model(config: PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _shards(config: PretrainedConfig) -> Iterator[Shapes]:
    """Names and shapes, a layer a shard."""
    parameters = dict(_model(config).named_parameters())
    if config.tie_word_embeddings:
        parameters.pop("lm_head.weight", None)

    def layer(name: str) -> str:
        return ".".join(name.split(".")[:3])

    for _, names in groupby(parameters, key=layer):
        yield {name: tuple(parameters[name].shape) for name in names}


def _tensor(
    shape: tuple[int, ...], block: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """From somewhere in the block on, again and again. Norms are near 1."""
    count, start = torch.Size(shape).numel(), int(torch.randint(BLOCK, (), generator=generator))
    repeats = -(-(start // 128 * 128 + count) // BLOCK)
    values = block.repeat(repeats)[start // 128 * 128 :][:count].reshape(shape)
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
    return values * scale + (len(shape) == 1)


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.absolute().parents) if one.exists())


if __name__ == "__main__":
    sys.exit(main())
