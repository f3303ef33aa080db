"""The command line: `python -m export …`. Results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from runtime.commands import Commands

app = typer.Typer(
    cls=Commands,
    help="From a checkpoint and a draft to a compiled bundle.",
    epilog="Example: python -m export build --target model/ --draft draft/ --out bundle/",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what each pass does.")] = False,
) -> None:
    """From a checkpoint and a draft to a compiled bundle."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING)
    for library in ("transformers", "onnxscript", "onnx_ir", "torch.onnx"):
        logging.getLogger(library).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


@app.command(
    epilog="Example: python -m export build --target build/models/SmolLM2-135M-Instruct.Q4_1.gguf "
    "--draft examples/smollm2-draft --out build/demo"
)
def build(
    target: Annotated[str, typer.Option(help="A directory, a hub id or a .gguf file.")],
    out: Annotated[Path, typer.Option(help="The bundle's directory; must not exist.")],
    draft: Annotated[
        str,
        typer.Option(
            help="A directory or hub id: a draft model, EAGLE or Medusa heads; ngram to look up "
            "what the text says already, ngram+PATH to look up where it does and draft elsewhere; "
            "layer-skip for the target without some layers; none for plain decoding only."
        ),
    ] = "none",
    backend: Annotated[
        str,
        typer.Option(
            help="onnxruntime, on the CPU; on a GPU tensorrt or tensorrt-rtx for engines, "
            "onnxruntime-cuda for ONNX Runtime's CUDA provider."
        ),
    ] = "onnxruntime",
    compute_capability: Annotated[
        list[int] | None,
        typer.Option(
            help="Of --backend tensorrt-rtx: a target such as 89, may be repeated; default: all."
        ),
    ] = None,
    draft_backend: Annotated[
        str | None,
        typer.Option(help="Of an engine backend: onnxruntime puts the draft on the CPU."),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="Of the target's weights: fp32, int8 or int4, rounded to nearest; int4-gptq, "
            "int4-awq, int8-smoothquant (inputs in 8 bits, too) and int8-kv (caches, too) read "
            "text first; of engines fp16, bf16, int8, int4, int4-128, fp8-weight, fp4, and from "
            "text int4-gptq, int4-awq, int8-smoothquant or fp8; of onnxruntime-cuda fp16, int8 "
            "or int4."
        ),
    ] = "int8",
    draft_precision: Annotated[
        str | None, typer.Option(help="Of the draft's weights; default: the target's.")
    ] = None,
    calibration_prompts: Annotated[
        list[Path] | None,
        typer.Option(help="Of recipes that read text: JSON lines; default: a set of our own."),
    ] = None,
    no_rows_alike: Annotated[
        bool,
        typer.Option(
            "--no-rows-alike",
            help="int8: faster plain steps in long contexts, but drafts may turn a near tie.",
        ),
    ] = False,
    max_batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    max_context: Annotated[
        int | None, typer.Option(help="Prompt and answer together; default: up to 2048.")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Most tokens drafted a round.")] = 8,
    max_tree_nodes: Annotated[
        int, typer.Option(help="Most drafts of a tree verified at once; 0: chains only.")
    ] = 0,
    min_ngram: Annotated[
        int | None, typer.Option(help="Of --draft ngram: fewest tokens looked up; default: 2.")
    ] = None,
    max_ngram: Annotated[
        int | None, typer.Option(help="Of --draft ngram: most tokens looked up; default: 4.")
    ] = None,
    skip_layers: Annotated[
        str | None, typer.Option(help="Of --draft layer-skip: the layers, like 10-12,25.")
    ] = None,
    search_seconds: Annotated[
        float | None,
        typer.Option(help="Of --draft layer-skip: time to look for the layers; default: 120."),
    ] = None,
    retokenize: Annotated[
        bool,
        typer.Option(
            "--retokenize",
            help="A draft whose tokenizer isn't the target's: its text is proposed; slower.",
        ),
    ] = False,
    gate: Annotated[
        bool,
        typer.Option("--gate", help="Compare with the checkpoints; fail where it is too far."),
    ] = False,
    gate_reference: Annotated[
        str | None, typer.Option(help="Of --gate: a bundle; default: the checkpoints in fp32.")
    ] = None,
    max_acceptance_drop: Annotated[
        float | None, typer.Option(help="Of --gate: most that acceptance may fall; default: 0.02.")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Of --gate: most KL, nats a token; default: 0.05.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON line.")] = False,
) -> None:
    """Build a bundle: trace, lower, quantize, check, measure. Nothing is left if it fails."""
    from runtime.bundle import Bundle

    from .build import BuildRequest
    from .build import build as run
    from .calibrated import CalibrationRequest
    from .fidelity_gate import fidelity_gate
    from .inspect import as_json as described

    request = BuildRequest(
        target=target,
        draft=None if draft == "none" else draft,
        out=out,
        backend=backend,
        compute_capabilities=tuple(compute_capability or ()),
        draft_backend=draft_backend,
        precision=precision,
        draft_precision=draft_precision,
        calibration=CalibrationRequest(prompt_files=tuple(calibration_prompts or ())),
        rows_alike=not no_rows_alike,
        max_batch=max_batch,
        max_context=max_context,
        max_draft_tokens=k,
        max_tree_nodes=max_tree_nodes,
        min_ngram=min_ngram,
        max_ngram=max_ngram,
        skip_layers=skip_layers,
        search_seconds=search_seconds,
        retokenize=retokenize,
        gate=fidelity_gate(
            asked=gate, reference=gate_reference, drop=max_acceptance_drop, kl=max_kl
        ),
    )
    console = Console(stderr=True)
    path = run(request, progress=lambda text: console.print(f"· {text}", highlight=False))
    typer.echo(json.dumps(described(Bundle.load(path))) if as_json else str(path))


@app.command(epilog="Example: python -m export check build/demo")
def check(
    bundle: Annotated[Path, typer.Argument(help="The bundle's directory.")],
    prompts: Annotated[int, typer.Option(help="Texts decoded greedily both ways.")] = 200,
    samples: Annotated[int, typer.Option(help="Answers drawn for each sampling.")] = 250,
    no_spin: Annotated[
        bool, typer.Option("--no-spin", help="For a machine whose cores others want, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON line.")] = False,
) -> None:
    """Run a bundle's certificates again; the exit status is 1 if one fails."""
    from .certificates.check import Effort
    from .certificates.check import check as run
    from .certificates.table import as_table

    console = Console(stderr=True)
    with console.status("") as status:
        found = run(
            bundle, Effort(prompts=prompts, samples=samples, spin=not no_spin), status.update
        )
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in found]))
    else:
        Console().print(as_table(found))
    if any(one.failed for one in found):
        raise typer.Exit(1)


@app.command(epilog="Example: python -m export inspect build/demo")
def inspect(
    bundle: Annotated[Path, typer.Argument(help="The bundle's directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON line.")] = False,
) -> None:
    """Tell what is inside a bundle: models, limits, gate results, latency profile."""
    from runtime.bundle import Bundle

    from .inspect import as_json as described
    from .inspect import describe

    loaded = Bundle.load(bundle)
    if as_json:
        typer.echo(json.dumps(described(loaded)))
        return
    console = Console()
    for table in describe(loaded):
        console.print(table)
