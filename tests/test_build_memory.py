"""A build never holds the model: 1.5 billion parameters in the memory of a few tensors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import tokenizer
from transformers import Qwen2Config

from runtime.bundle import Bundle

CONFIG = Qwen2Config(  # as Qwen2-1.5B
    vocab_size=151_936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
    architectures=["Qwen2ForCausalLM"],
    dtype="bfloat16",
)
LARGEST_BYTES = 4 * CONFIG.vocab_size * CONFIG.hidden_size  # the embedding in f32
LIMIT_BYTES = 1.5e9 + 3 * LARGEST_BYTES
DISK_BYTES = 7e9

# The machine seems to have less memory than the eager model needs, as one would that needs the
# limit; nothing else is changed.
BUILD = """
import sys
from export import gates
gates.available_bytes = lambda: 4_000_000_000
from export.cli import app
app(sys.argv[1:], prog_name="python -m export")
"""


def layer_shapes() -> dict[str, tuple[int, ...]]:
    hidden, mlp = CONFIG.hidden_size, CONFIG.intermediate_size
    kv = hidden // CONFIG.num_attention_heads * CONFIG.num_key_value_heads
    projections = {"q": hidden, "k": kv, "v": kv}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    for name, rows in projections.items():
        shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    return shapes


def shards() -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes, a shard at a time."""
    hidden = CONFIG.hidden_size
    yield {"model.embed_tokens.weight": (CONFIG.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(CONFIG.num_hidden_layers):
        yield {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes().items()}


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
    noise = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
    return noise * scale + (len(shape) == 1)


def write_checkpoint(directory: Path) -> int:
    """Returns the number of parameters. One shard is held at a time."""
    directory.mkdir()
    CONFIG.save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    generator, where, count = torch.Generator().manual_seed(0), {}, 0
    for i, shard in enumerate(shards()):
        name = f"model-{i:05}.safetensors"
        tensors = {n: random_tensor(shape, generator) for n, shape in shard.items()}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
        count += sum(tensor.numel() for tensor in tensors.values())
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return count


def build(arguments: list[str], root: Path) -> tuple[int, float]:
    """Peak resident bytes and seconds of a build in a process of its own."""
    start = perf_counter()
    process = subprocess.Popen([sys.executable, "-c", BUILD, "build", *arguments], cwd=root)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024, perf_counter() - start


@pytest.mark.slow
def test_peak_memory(tmp_path: Path, root: Path, record_property: pytest.RecordProperty) -> None:
    """Also the gates that need the graph alone stay within it; parity says why it is skipped."""
    if shutil.disk_usage(tmp_path).free < DISK_BYTES:
        pytest.skip(f"needs {DISK_BYTES / 1e9:.0f} GB of disk in {tmp_path}")
    checkpoint, out = tmp_path / "random-1.5b", tmp_path / "bundle"
    parameters = write_checkpoint(checkpoint)
    assert 1.5e9 < parameters < 1.6e9

    arguments = ["--target", str(checkpoint), "--out", str(out), "--precision", "int4"]
    peak_bytes, seconds = build(arguments, root)
    record_property("peak_bytes", peak_bytes)
    record_property("build_s", seconds)
    print(f"peak {peak_bytes / 1e9:.2f} GB of {LIMIT_BYTES / 1e9:.2f} GB, {seconds:.0f} s")  # noqa: T201
    shutil.rmtree(checkpoint)

    manifest = Bundle.load(out).manifest
    assert manifest.target.parameters == parameters
    gates = {gate.name: gate for gate in manifest.gates}
    assert gates["target parity"].status == "skipped"
    assert "the eager model needs" in gates["target parity"].reason
    assert {name for name, gate in gates.items() if gate.status == "passed"} >= {"rows", "rollback"}
    assert peak_bytes <= LIMIT_BYTES
