"""Builds a checkpoint with ONNX Runtime GenAI's own model builder.

    python scripts/peers/build_genai.py CHECKPOINT.gguf FOLDER --package SITE_PACKAGES

Runs in the environment that has torch and transformers; `--package` is the folder where
`onnxruntime_genai` lies, so that the benchmark's environment needs neither.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--block-size", type=int, default=32)
    args = parser.parse_args()
    source = args.folder.with_name(args.folder.name + "-hf")
    dequantize(args.checkpoint, source)
    run_builder(args.package, source, args.folder, args.block_size)


def dequantize(checkpoint: Path, folder: Path) -> None:
    """The GGUF as the Hugging Face directory that the builder reads."""
    if (folder / "tokenizer.json").is_file():
        return
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.parent,
        gguf_file=checkpoint.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint.parent, gguf_file=checkpoint.name).save_pretrained(
        folder
    )


def run_builder(package: Path, source: Path, folder: Path, block_size: int) -> None:
    builder = package / "onnxruntime_genai" / "models" / "builder.py"
    sys.path[:0] = [str(builder.parent)]
    sys.path.append(str(package))
    options = ["accuracy_level=4", f"block_size={block_size}"]
    cache = str(folder.with_name(folder.name + "-cache"))
    sys.argv = [str(builder), "-m", str(source), "-i", str(source), "-o", str(folder)]
    sys.argv += ["-p", "int4", "-e", "cpu", "-c", cache, "--extra_options", *options]
    runpy.run_path(str(builder), run_name="__main__")


if __name__ == "__main__":
    main()
