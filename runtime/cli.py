"""The command line: `python -m runtime …`. Text and results on stdout, all else on stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .bench import EXAMPLE as BENCH_EXAMPLE
from .bench import bench_command
from .commands import Commands
from .decoder import Decoder, Result
from .errors import InvalidRequest
from .generation import Chunk
from .grammar import Grammar
from .request import Prompt
from .sampling import SamplingParams
from .stats import Stats
from .tree_shape import parse_tree

app = typer.Typer(
    cls=Commands,
    help="Speculative tokens from a compiled bundle.",
    epilog="Example: python -m runtime generate build/demo --prompt 'def fib(n):'",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Speculative tokens from a compiled bundle."""


@app.command(epilog="Example: python -m runtime generate build/demo --prompt 'def fib(n):' --stats")
def generate(
    bundle: Annotated[Path, typer.Argument(help="The bundle's directory.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to go on from; - reads it from stdin.")
    ] = None,
    messages: Annotated[
        Path | None, typer.Option(help="A JSON file of chat messages, [{role, content}, …].")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Tokens kept; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Probability kept; 1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest's.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="For tokens of prompt and answer; 1 changes nothing.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Off the logit of a token in the answer; -2 to 2.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, for each time that it's there; -2 to 2.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=BIAS, -100 to 100. May be repeated.")
    ] = None,
    ban: Annotated[
        list[int] | None, typer.Option(help="A token id that is never drawn. May be repeated.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="No end token before as many.")] = 0,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file: the answer must be JSON of this schema.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The answer must match this.")] = None,
    lark: Annotated[
        Path | None, typer.Option(help="A file: the answer must follow this Lark grammar.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Default: to the end token or the context limit.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: drawn, and told by --stats.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Ends the text, itself left out. May be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end token.")
    ] = False,
    k: Annotated[
        int | None, typer.Option("-k", min=0, help="Tokens drafted a round; default: chosen.")
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            help="Draft a tree a round: widths as 4x2x1, dynamic:NODES, or a JSON list of paths."
        ),
    ] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Plain decoding; the same as -k 0.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    no_spin: Annotated[
        bool, typer.Option("--no-spin", help="For a machine whose cores others want, too.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Don't check the files' hashes first.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Tell speed and acceptance, on stderr.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON line instead of streamed text.")
    ] = False,
) -> None:
    """Stream an answer to stdout as its tokens are committed."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_bias(logit_bias or []),
        banned_tokens=tuple(ban or ()),
        min_tokens=min_tokens,
        grammar=_grammar(json_schema, regex, lark),
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    content = _prompt(prompt, messages)
    draft_tokens = _draft_tokens(k, no_speculation)
    shape = parse_tree(tree) if tree is not None else None
    with Decoder.load(bundle, verify=not no_verify, threads=threads, spin=not no_spin) as decoder:
        if as_json:
            result = decoder.generate(content, params, num_draft_tokens=draft_tokens, tree=shape)
            typer.echo(json.dumps(_result_dict(result), ensure_ascii=False))
        else:
            stream = decoder.stream(content, params, num_draft_tokens=draft_tokens, tree=shape)
            for chunk in stream:
                _emit(chunk)
        if stats and decoder.stats:
            typer.echo(_summary(decoder.stats), err=True)


app.command("bench", epilog=BENCH_EXAMPLE)(bench_command)


def _prompt(prompt: str | None, messages: Path | None) -> Prompt:
    if (prompt is None) == (messages is None):
        raise typer.BadParameter("Expected one of --prompt and --messages.")
    if messages is not None:
        return _read_messages(messages)
    return sys.stdin.read() if prompt == "-" else prompt or ""


def _bias(pairs: list[str]) -> dict[int, float]:
    """``["42=-5"]`` → {42: −5.0}."""
    result = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            result[int(token)] = float(bias)
        except ValueError as error:
            raise InvalidRequest(
                f"--logit-bias: received {pair!r}. Expected ID=BIAS, such as 42=-5."
            ) from error
    return result


def _grammar(json_schema: Path | None, regex: str | None, lark: Path | None) -> Grammar | None:
    given = [source for source in (json_schema, regex, lark) if source is not None]
    if len(given) > 1:
        raise typer.BadParameter("Expected one of --json-schema, --regex and --lark.")
    if json_schema is not None:
        return Grammar.json_schema(_read_text("--json-schema", json_schema))
    if lark is not None:
        return Grammar.lark(_read_text("--lark", lark))
    return None if regex is None else Grammar.regex(regex)


def _read_text(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{option} {path}: {error}. Expected a UTF-8 file.") from error


def _read_messages(path: Path) -> Prompt:
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--messages {path}: {error}. Expected a JSON file.") from error
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest(f"--messages {path}: expected a list of objects, role and content.")
    return messages


def _draft_tokens(k: int | None, no_speculation: bool) -> int | None:
    if no_speculation and k:
        raise typer.BadParameter("-k and --no-speculation exclude each other.")
    return 0 if no_speculation else k


def _emit(chunk: Chunk) -> None:
    if chunk.text:
        typer.echo(chunk.text, nl=False)
    if chunk.finish_reason:
        typer.echo()
    sys.stdout.flush()


def _result_dict(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "stats": result.stats.as_dict(),
    }


def _summary(stats: Stats) -> str:
    """Three lines: what ended it and how fast, what speculation did, where the time went."""
    steps = stats.num_spec_steps + stats.num_plain_steps
    total_s = stats.decode_s or float("inf")
    parts = ["draft", "verify", "accept", *(["compact"] if stats.compact_s else []), "overhead"]
    shares = ", ".join(f"{p} {getattr(stats, f'{p}_s') / total_s:.1%}" for p in parts)
    lines = [
        f"{stats.num_output_tokens} tokens ({stats.finish_reason}), seed {stats.seed}, first "
        f"after {stats.ttft_s:.3f} s, then {stats.decode_tokens_per_s or 0:.1f} tokens/s",
        f"{steps} rounds, {stats.num_spec_steps} of them drafted: "
        f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} draft tokens accepted",
        f"decode time: {shares}",
    ]
    if stats.mean_acceptance_length is not None:
        lines[1] += (
            f" ({stats.acceptance_rate:.1%}), mean acceptance length "
            f"{stats.mean_acceptance_length:.2f}"
        )
    return "\n".join(lines)
