"""What accept and the draft's sampling tail cost a round on this machine, in milliseconds.

    python scripts/time_accept.py --vocab 49152 --draft-vocab 6144 -k 4

All cases take turns, so that a busy moment of the machine falls on every one of them alike. `cpu`
is the calling thread's own time, which other processes lengthen less; accept runs on that thread
alone, as in the runtime.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from export.accept_graph import accept_model
from export.certificates.round_graphs import chain
from export.draft_tail import append_draft_sampling
from runtime.sampling import SamplingParams
from runtime.sampling_inputs import SamplingInputs

Feed = dict[str, np.ndarray]

GREEDY = SamplingParams()
NUCLEUS = SamplingParams(temperature=0.7, top_k=50, top_p=0.95)
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.3}
HISTORY = 400  # tokens of the prompt, and of the answer so far


@dataclass(frozen=True, kw_only=True)
class Case:
    params: SamplingParams
    allowed: float = 1.0  # share of the vocabulary that a mask leaves


CASES = {
    "greedy": Case(params=GREEDY),
    "greedy, penalties": Case(params=replace(GREEDY, **PENALTIES)),
    "greedy, mask": Case(params=replace(GREEDY, banned_tokens=(1,)), allowed=0.02),
    "T=1": Case(params=SamplingParams(temperature=1.0)),
    "T=1 top-k 50": Case(params=SamplingParams(temperature=1.0, top_k=50)),
    "T=0.7 top-k 50 top-p 0.95": Case(params=NUCLEUS),
    "… repetition alone": Case(params=replace(NUCLEUS, repetition_penalty=1.1)),
    "… presence, frequency": Case(
        params=replace(NUCLEUS, presence_penalty=0.5, frequency_penalty=0.3)
    ),
    "… all penalties": Case(params=replace(NUCLEUS, **PENALTIES)),
    "… bias": Case(params=replace(NUCLEUS, logit_bias={5: 1.0, 77: -2.0})),
    "… mask": Case(params=replace(NUCLEUS, banned_tokens=(1,)), allowed=0.02),
    "… penalties, bias, mask": Case(
        params=replace(NUCLEUS, logit_bias={5: 1.0}, banned_tokens=(1,), **PENALTIES), allowed=0.02
    ),
    "T=1 top-p 0.9 min-p 0.05": Case(params=SamplingParams(temperature=1.0, top_p=0.9, min_p=0.05)),
    "T=3 top-p 0.99 (searched)": Case(params=SamplingParams(temperature=3.0, top_p=0.99)),
}


def main() -> None:
    args = _arguments()
    rng = np.random.default_rng(0)
    accept = _session(accept_model(args.vocab, _d2t(args)), 1)
    draft = _session(_draft_body(args), args.threads)
    runs = {}
    for name, case in CASES.items():
        runs[f"accept  {name}"] = (accept, _accept_feed(rng, args, case))
        runs[f"draft   {name}"] = (draft, _draft_feed(rng, args, case))
    print(
        f"V={args.vocab} D={args.draft_vocab} k={args.k} batch={args.batch}, accept on 1 thread, "
        f"draft on {args.threads}; per call"
    )
    for name, ms in _timed(runs, args.rounds).items():
        wall, cpu = np.transpose(ms)
        low, mid, high = np.percentile(wall, [25, 50, 75])
        spread = f"quartiles {low:.3f} to {high:.3f}   fastest {min(wall):.3f}"
        used = f"cpu median {np.median(cpu):.3f}, least {min(cpu):.3f}"
        print(f"{name:36s} median {mid:7.3f} ms   {spread}   {used}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--draft-vocab", type=int, default=6_144)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=101)
    return parser.parse_args()


def _d2t(args: argparse.Namespace) -> np.ndarray:
    ids = np.sort(np.random.default_rng(1).permutation(args.vocab)[: args.draft_vocab])
    return ids - np.arange(args.draft_vocab)


def _session(model: ir.Model, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _draft_body(args: argparse.Namespace) -> ir.Model:
    """A body that costs nothing: its logits are an input."""
    given = ir.val("body", dtype=ir.DataType.FLOAT, shape=["batch", 1, args.draft_vocab])
    node = ir.node("Identity", [given])
    logits = node.outputs[0]
    logits.name, logits.dtype, logits.shape = "logits", given.dtype, given.shape
    graph = ir.Graph([given], [logits], nodes=[node], opset_imports={"": 24}, name="draft")
    model = ir.Model(graph, ir_version=10)
    append_draft_sampling(model, _d2t(args), vocab_size=args.vocab)
    return model


def _logits(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Steep in the way of a language model: the top token near p = 0.5, a long tail."""
    ranks = np.argsort(rng.random(shape), axis=-1)
    noise = rng.normal(0, 0.3, shape)
    return (-1.3 * np.log1p(ranks) + noise + 10).astype(np.float32)


def _asked(rng: np.random.Generator, args: argparse.Namespace, case: Case, rows: int) -> Feed:
    """The sampling inputs as the runtime fills them, the same for every sequence of a batch."""
    inputs = SamplingInputs(args.vocab, rows)
    inputs.begin(case.params, rng.integers(0, args.vocab, HISTORY).tolist())
    inputs.commit(rng.integers(0, args.vocab, HISTORY).tolist())
    if case.allowed < 1:
        inputs.allowed[:] = rng.random(inputs.allowed.shape) < case.allowed
        inputs.allowed[..., _d2t(args)[0]] = True  # the first one that the draft knows
    asked = {**inputs.shared, "allowed_tokens": inputs.allowed}
    return {name: np.repeat(value, args.batch, 0) for name, value in asked.items()}


def _accept_feed(rng: np.random.Generator, args: argparse.Namespace, case: Case) -> Feed:
    b, k = args.batch, args.k
    logits = _logits(rng, b, k + 1, args.vocab)
    d2t = _d2t(args)
    q = np.exp(logits[:, :k, d2t + np.arange(args.draft_vocab)])
    q /= q.sum(-1, keepdims=True)
    drafts = q.argmax(-1)
    return {
        "logits": logits,
        "draft_tokens": drafts + d2t[drafts],
        "draft_probs": q,
        "accept_uniforms": rng.random((b, k), np.float32),
        "draw_uniforms": rng.random((b, k + 1), np.float32),
        "past_lengths": np.full(b, 7, np.int32),
        **{name: np.repeat(value, b, 0) for name, value in chain(k).items()},
        **_asked(rng, args, case, k + 1),
    }


def _draft_feed(rng: np.random.Generator, args: argparse.Namespace, case: Case) -> Feed:
    """The last step of a round, which counts the most drafts."""
    b, size = args.batch, args.draft_vocab
    return {
        "body": _logits(rng, b, 1, size),
        "draft_uniforms": rng.random(b, np.float32),
        "drafted_tokens": np.tile(_d2t(args)[: args.k - 1] + np.arange(args.k - 1), (b, 1)),
        **_asked(rng, args, case, 1),
    }


def _timed(
    runs: dict[str, tuple[ort.InferenceSession, Feed]], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of each run: on the clock, and of the calling thread."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (session, feed) in runs.items():
            bound = session.io_binding()
            for key, value in feed.items():
                bound.bind_cpu_input(key, value)
            for output in session.get_outputs():
                bound.bind_output(output.name)
            session.run_with_iobinding(bound)  # threads awake, caches warm, as inside a round
            start_s, cpu_s = time.perf_counter(), time.thread_time()
            session.run_with_iobinding(bound)
            spent_s = time.perf_counter() - start_s, time.thread_time() - cpu_s
            times[name].append((1e3 * spent_s[0], 1e3 * spent_s[1]))
    return times


if __name__ == "__main__":
    main()
