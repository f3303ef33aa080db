"""llama.cpp through its C interface: greedy decoding, one token a call."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import llama_cpp as lib
import numpy as np
from protocol import serve

CONTEXT = 2048


def load(path: str, threads: int):
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = CONTEXT
    params.n_threads = params.n_threads_batch = threads
    return model, lib.llama_init_from_model(model, params)


def generate(model, context, request: dict) -> Iterator[int]:
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    tokens = request["ids"]
    for _ in range(request["max_tokens"]):
        array = (lib.llama_token * len(tokens))(*tokens)
        if lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))) != 0:
            raise RuntimeError(f"llama_decode refused {len(tokens)} tokens")
        logits = lib.llama_get_logits_ith(context, -1)
        tokens = [int(np.argmax(np.ctypeslib.as_array(logits, shape=(vocab,))))]
        yield tokens[0]


def main() -> None:
    model, context = load(sys.argv[1], int(sys.argv[2]))
    serve("llama.cpp", lib.__version__, lambda request: generate(model, context, request))


if __name__ == "__main__":
    main()
