"""Outrider itself, under the same protocol; `num_draft_tokens` null lets it choose."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version

from protocol import serve

from runtime import Decoder, SamplingParams


def generate(decoder: Decoder, request: dict) -> Iterator[int]:
    params = SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True)
    stream = decoder.stream(request["ids"], params, num_draft_tokens=request["num_draft_tokens"])
    for chunk in stream:
        yield from chunk.token_ids


def main() -> None:
    decoder = Decoder.load(sys.argv[1], threads=int(sys.argv[2]))
    serve("outrider", version("outrider"), lambda request: generate(decoder, request))


if __name__ == "__main__":
    main()
