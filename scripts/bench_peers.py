#!/usr/bin/env python3
"""Outrider beside other systems: the same weights, prompts, threads and machine, in one run.

    python scripts/bench_peers.py prepare --checkpoint build/models/SmolLM2-135M-Instruct.Q4_1.gguf
    python scripts/bench_peers.py run build/demo --out build/peers/result.json

`prepare` makes an environment of the peers' own under build/peers (llama.cpp compiles for about
ten minutes). `run` sends the same token ids to every system in turn, greedy, past the end token,
and reports the tokens behind the first over the time from the first to the last.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from peers.environment import GGUF_TYPES, Peers, prepare
from peers.worker import System, Worker
from rich.console import Console
from rich.table import Table

from runtime import Decoder
from runtime.bench.machine import describe_machine
from runtime.bench.prompts import load_prompts

PAUSE_S = 0.3  # lets the last system's threads go to sleep
CHECKPOINT = Path("build/models/SmolLM2-135M-Instruct.Q4_1.gguf")

app = typer.Typer(add_completion=False, help=__doc__)


@app.command("prepare")
def prepare_command(checkpoint: Annotated[Path, typer.Option()] = CHECKPOINT) -> None:
    """Make the peers' environment and models; what is there already is kept."""
    prepare(Peers(), checkpoint)


@app.command("run")
def run_command(
    bundles: Annotated[list[Path] | None, typer.Argument(help="Bundles to compare.")] = None,
    checkpoint: Annotated[Path, typer.Option(help="The GGUF itself, for llama.cpp.")] = CHECKPOINT,
    limit: Annotated[int, typer.Option(help="Shipped prompts of each category.")] = 1,
    max_tokens: Annotated[int, typer.Option()] = 128,
    repeats: Annotated[int, typer.Option()] = 3,
    threads: Annotated[int, typer.Option()] = 2,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here too.")] = None,
) -> None:
    """Measure all systems interleaved; the table goes to stderr, JSON to stdout."""
    machine = describe_machine(threads)
    workers = start(systems(Peers(), bundles or [], checkpoint), threads)
    prompts = encoded_prompts(bundles or [], limit)
    samples = measure(workers, prompts, max_tokens, repeats)
    rows = [summary(worker, samples[worker.system.name]) for worker in workers]
    for worker in workers:
        worker.close()
    show(rows)
    settings = {"prompts": len(prompts), "max_tokens": max_tokens, "repeats": repeats}
    text = json.dumps({"machine": machine, "settings": settings, "systems": rows})
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)


def start(found: list[System], threads: int) -> list[Worker]:
    """A worker for each system that is prepared; the others are named and left out."""
    ready = [system for system in found if system.python.exists() and system.model.exists()]
    for system in found:
        if system not in ready:
            print(f"left out: {system.name}: not prepared", file=sys.stderr)
    return [Worker(system, threads) for system in ready]


def systems(peers: Peers, bundles: list[Path], checkpoint: Path) -> list[System]:
    ours = [
        System(
            name=f"outrider {bundle.name} {way}",
            script="outrider_worker.py",
            python=Path(sys.executable),
            model=bundle,
            num_draft_tokens=k,
        )
        for bundle in bundles
        for way, k in (("plain", 0), ("auto", None))
    ]
    genai = System(
        name="onnxruntime-genai int4",
        script="genai_worker.py",
        python=peers.python,
        model=peers.genai,
    )
    ggufs = {kind: peers.gguf(kind) for kind in GGUF_TYPES} | {"Q4_1": checkpoint}
    llama = [
        System(
            name=f"llama.cpp {kind}", script="llamacpp_worker.py", python=peers.python, model=path
        )
        for kind, path in ggufs.items()
    ]
    return [*ours, genai, *llama]


def encoded_prompts(bundles: list[Path], limit: int) -> list[list[int]]:
    """Token ids of the shipped prompts, by the first bundle's tokenizer."""
    if not bundles:  # every vocabulary of the example model reads these as some text
        return [[1 + (37 * i + 11 * j) % 40000 for j in range(48)] for i in range(3)]
    with Decoder.load(bundles[0]) as decoder:
        return [decoder.encode(prompt.content) for prompt in load_prompts([], [], limit)]


def measure(
    workers: list[Worker], prompts: list[list[int]], max_tokens: int, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Every system on every prompt; each first answers once unmeasured."""
    samples: dict[str, list[dict[str, Any]]] = {worker.system.name: [] for worker in workers}
    for worker in workers:
        worker.ask(prompts[0], 16)
    for repeat in range(repeats):
        for index, ids in enumerate(prompts):
            turn = (repeat + index) % len(workers)  # nobody always goes first
            for worker in workers[turn:] + workers[:turn]:
                time.sleep(PAUSE_S)
                answer = worker.ask(ids, max_tokens)
                samples[worker.system.name].append({**answer, "repeat": repeat, "prompt": index})
        print(f"· repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
    return samples


def summary(worker: Worker, samples: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [
        sum(len(s["ids"]) - 1 for s in chosen) / sum(s["decode_s"] for s in chosen)
        for repeat in sorted({s["repeat"] for s in samples})
        for chosen in [[s for s in samples if s["repeat"] == repeat]]
    ]
    return {
        "system": worker.system.name,
        "version": worker.greeting["version"],
        "decode_tokens_per_s": median(rates),
        "low": min(rates),
        "high": max(rates),
        "ttft_s": median(s["first_s"] for s in samples),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for name in ("system", "version"):
        table.add_column(name)
    for name in ("decode tok/s", "low–high", "TTFT ms"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["system"],
            row["version"],
            f"{row['decode_tokens_per_s']:.1f}",
            f"{row['low']:.1f}–{row['high']:.1f}",
            f"{1000 * row['ttft_s']:.0f}",
        )
    Console(stderr=True).print(table)


if __name__ == "__main__":
    app()
