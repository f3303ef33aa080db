"""ONNX Runtime GenAI: greedy decoding of a model that its own builder made."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import onnxruntime_genai as og
from protocol import serve


def load(folder: str, threads: int) -> og.Model:
    config = og.Config(folder)
    # An end token that never comes, so that every system makes as many tokens.
    overlay = {
        "model": {
            "eos_token_id": 3,
            "decoder": {"session_options": {"intra_op_num_threads": threads}},
        }
    }
    config.overlay(json.dumps(overlay))
    return og.Model(config)


def generate(model: og.Model, request: dict) -> Iterator[int]:
    params = og.GeneratorParams(model)
    length = len(request["ids"]) + request["max_tokens"]
    params.set_search_options(do_sample=False, max_length=length)
    generator = og.Generator(model, params)
    generator.append_tokens(request["ids"])
    while not generator.is_done():
        generator.generate_next_token()
        yield generator.get_next_tokens()[0]


def main() -> None:
    model = load(sys.argv[1], int(sys.argv[2]))
    serve("onnxruntime-genai", og.__version__, lambda request: generate(model, request))


if __name__ == "__main__":
    main()
