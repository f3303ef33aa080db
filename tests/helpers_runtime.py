"""Tiny real models that obey the graph contracts, read through a real KV cache.

A model's next-token logits are a row of a table, chosen by a hash over every valid cache row and
its position: a wrong length, a wrong position or a stale row gives other tokens. The sums are of
small integers, so that any split into calls gives the same bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from export.accept_graph import accept_model
from export.draft_tail import append_draft_sampling, tail_model
from runtime.contract import CacheSpec
from runtime.manifest import (
    DRAFT_TOKENIZER,
    SCHEMA,
    DraftCard,
    FileRecord,
    LayerSkipDraft,
    Limits,
    Manifest,
    ModelCard,
    ModelDraft,
    NgramDraft,
    NgramPlusDraft,
    RetokenizedDraft,
)
from runtime.reference import accept, draft_sample
from runtime.sampling import SamplingParams
from runtime.uniforms import ACCEPT, DRAFT, DRAW, uniform_table

STATES = 61  # rows of a logit table

_CACHED_STATE = """
    ids = Cast <to = 1> (input_ids)
    axes = Constant <value_ints = [1, 3]> ()
    rows = Unsqueeze (ids, axes)
    past64 = Cast <to = 7> (past_lengths)
    present_key = TensorScatter <axis = 2> (past_key, rows, past64)
    present_value = TensorScatter <axis = 2> (past_value, rows, past64)
    one = Constant <value_int = 1> ()
    zero = Constant <value_int = 0> ()
    id_shape = Shape (input_ids)
    query_len = Gather (id_shape, one)
    cache_shape = Shape (present_key)
    two = Constant <value_int = 2> ()
    context = Gather (cache_shape, two)
    queries = Range (zero, query_len, one)
    columns = Range (zero, context, one)
    row_index = Add (queries, past64)
    minus = Constant <value_ints = [-1]> ()
    row_column = Unsqueeze (row_index, minus)
    seen = LessOrEqual (columns, row_column)
    seen_f = Cast <to = 1> (seen)
    eleven = Constant <value_int = 11> ()
    three = Constant <value_int = 3> ()
    tripled = Mul (columns, three)
    weight = Mod (tripled, eleven)
    shifted = Add (weight, one)
    weight_f = Cast <to = 1> (shifted)
    flat_shape = Constant <value_ints = [-1]> ()
    keys = Reshape (present_key, flat_shape)
    weighted = Mul (keys, weight_f)
    sums = MatMul (seen_f, weighted)
    sums64 = Cast <to = 7> (sums)
    last = Reshape (input_ids, flat_shape)
    last7 = Mul (last, eleven)
    total = Add (sums64, last7)
    states = Constant <value_int = 61> ()
    state = Mod (total, states)
"""

_TARGET = """
<ir_version: 10, opset_import: ["" : 24]>
target (int64[batch, query_len] input_ids, int32[batch] past_lengths, int64 num_logits,
        float[batch, 1, {context}, 1] past_key,
        float[batch, 1, {context}, 1] past_value)
    => (float[batch, num_logits, {vocab}] logits, float[batch, 1, {context}, 1] present_key,
        float[batch, 1, {context}, 1] present_value)
{{{state}
    first = Sub (query_len, num_logits)
    first1 = Reshape (first, flat_shape)
    end1 = Reshape (query_len, flat_shape)
    wanted = Slice (state, first1, end1)
    rows_out = Gather (table, wanted)
    axis0 = Constant <value_ints = [0]> ()
    logits = Unsqueeze (rows_out, axis0)
}}
"""

# onnx.parser takes no dots in a name
_CACHE_NAMES = {
    "past_key": "past_key_values.0.key",
    "past_value": "past_key_values.0.value",
    "present_key": "present.0.key",
    "present_value": "present.0.value",
}


def target_text(table: NDArray[Any], context: int) -> str:
    """The target as onnx.parser reads it, its caches not yet named as in the contract."""
    return _TARGET.format(context=context, vocab=table.shape[1], state=_CACHED_STATE)


def _table_model(table: NDArray[Any], context: int) -> onnx.ModelProto:
    return named_caches(onnx.parser.parse_model(target_text(table, context)), {"table": table})


def named_caches(model: onnx.ModelProto, tables: dict[str, NDArray[Any]]) -> onnx.ModelProto:
    """Give a parsed model the contract's names and its tables."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [_CACHE_NAMES.get(name, name) for name in names]
    for value in (*model.graph.input, *model.graph.output):
        value.name = _CACHE_NAMES.get(value.name, value.name)
    for name, table in tables.items():
        model.graph.initializer.append(numpy_helper.from_array(table, name))
    onnx.checker.check_model(model)
    return model


def target_table(vocab: int, seed: int = 0, sharpness: float = 3.0) -> NDArray[Any]:
    """[STATES, vocab] f32 logits."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((STATES, vocab)) * sharpness).astype(np.float32)


def near_table(table: NDArray[Any], noise: float, seed: int = 1) -> NDArray[Any]:
    """A draft's table: like its target's, more or less."""
    rng = np.random.default_rng(seed)
    return table + (rng.standard_normal(table.shape) * noise).astype(np.float32)


def save_target(path: Path, table: NDArray[Any], context: int) -> None:
    onnx.save(_table_model(table, context), path)


@dataclass(frozen=True, kw_only=True)
class SkippedTable:
    """What a table target says while it skips layers."""

    table: NDArray[Any]  # [STATES, vocab] f32


def save_skippable_target(
    path: Path, table: NDArray[Any], skipped: SkippedTable, context: int
) -> None:
    """A target of another table, and other rows in its cache, while `skip_layers` is true.

    A row that a draft leaves is wrong for the whole target: unless verification overwrites it, the
    text that follows is another one.
    """
    model = _table_model(table, context)
    graph = model.graph
    skip = onnx.helper.make_tensor_value_info("skip_layers", onnx.TensorProto.BOOL, [])
    graph.input.append(skip)
    graph.initializer.append(numpy_helper.from_array(np.array(False), "skip_layers"))
    graph.initializer.append(numpy_helper.from_array(skipped.table, "skipped_table"))
    for node in graph.node:
        for old, new in (("table", "chosen_table"), ("rows", "marked_rows")):
            node.input[:] = [new if name == old else name for name in node.input]
    chosen = onnx.helper.make_node(
        "Where", ["skip_layers", "skipped_table", "table"], ["chosen_table"]
    )
    mark = onnx.helper.make_node("Cast", ["skip_layers"], ["mark"], to=onnx.TensorProto.FLOAT)
    marked = onnx.helper.make_node("Add", ["rows", "mark"], ["marked_rows"])
    place = 1 + next(i for i, node in enumerate(graph.node) if "rows" in node.output)
    graph.node.insert(place, marked)
    graph.node.insert(0, mark)
    graph.node.insert(0, chosen)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def save_draft(
    path: Path,
    table: NDArray[Any],
    context: int,
    d2t: NDArray[Any] | None = None,
    vocab: int | None = None,
) -> None:
    """The same kind of model, its last row sampled by the exporter's own tail."""
    model = ir.serde.deserialize_model(_table_model(table, context))
    _last_row_only(model)
    append_draft_sampling(model, d2t, vocab_size=vocab)
    ir.save(model, path)


def _last_row_only(model: ir.Model) -> None:
    """A draft projects its last row: num_logits is 1 and no input."""
    (value,) = [v for v in model.graph.inputs if v.name == "num_logits"]
    model.graph.inputs.remove(value)
    one = ir.Value(name="one_logit", const_value=ir.tensor(np.array(1, np.int64)))
    model.graph.initializers.add(one)
    value.replace_all_uses_with(one)
    (logits,) = [v for v in model.graph.outputs if v.name == "logits"]
    logits.shape = ir.Shape(["batch", 1, logits.shape[2]])


def byte_tokenizer(
    vocab: int,
    *,
    order: Sequence[int] = range(256),
    merges: Sequence[tuple[str, str]] = (),
) -> Tokenizer:
    """One token a byte, so that a character may span tokens; then <eos>, <bos> and fillers.

    vocab: 258 at least; id 0 … 255 in the order of the byte alphabet, eos is 256, bos 257. order:
    which byte has each of the first ids; merges: their tokens take the first fillers' places.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [*("".join(pair) for pair in merges), *(f"<extra{i}>" for i in range(vocab - 258))]
    tokens = [*(alphabet[i] for i in order), "<eos>", "<bos>", *fillers[: vocab - 258]]
    ids = {t: i for i, t in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t in tokens[256:] if t not in {a + b for a, b in merges}]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    return tokenizer


EOS, BOS, VOCAB = 256, 257, 258

CHAT_TEMPLATE = """{% for m in messages %}<bos>{{ m['role'] }}
{{ m['content'] }}<eos>
{% endfor %}
{% if add_generation_prompt %}<bos>assistant
{% endif %}"""


def write_bundle(
    path: Path,
    table: NDArray[Any],
    draft: NDArray[Any] | NgramDraft | SkippedTable | None,
    *,
    context: int = 96,
    max_draft_tokens: int = 4,
    eos: tuple[int, ...] = (EOS,),
    latency: dict[str, Any] | None = None,
    d2t: NDArray[Any] | None = None,
    lookup: NgramDraft | None = None,
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
) -> Path:
    """A whole bundle on disk, as Decoder.load reads one.

    lookup: before a draft model. tokenizers: the target's and its draft's, which differ.
    """
    vocab = table.shape[1]
    (path / "onnx").mkdir(parents=True)
    target = path / "onnx" / "target.onnx"
    if isinstance(draft, SkippedTable):
        save_skippable_target(target, table, draft, context)
        ir.save(tail_model(vocab), path / "onnx" / "tail.onnx")
    else:
        save_target(target, table, context)
    ir.save(
        accept_model(vocab, d2t, draft_vocab_size=None if tokenizers else _draft_vocab(draft)),
        path / "onnx" / "accept.onnx",
    )
    if isinstance(draft, np.ndarray):
        known = draft.shape[1] if tokenizers else vocab
        save_draft(path / "onnx" / "draft.onnx", draft, context, d2t, known)
    own = tokenizers[0] if tokenizers else byte_tokenizer(max(vocab, VOCAB))
    own.save(str(path / "tokenizer.json"))
    if tokenizers:
        tokenizers[1].save(str(path / DRAFT_TOKENIZER))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    if d2t is not None:
        np.save(path / "d2t.npy", d2t)
    (path / "generation_config.json").write_text("{}")
    limits = Limits(
        max_batch=1,
        max_context=context,
        max_draft_tokens=max_draft_tokens if draft is not None else 0,
    )
    manifest = _manifest(path, vocab, draft, limits, eos)
    if tokenizers is not None:
        assert isinstance(manifest.draft, ModelDraft)
        manifest = replace(manifest, draft=RetokenizedDraft(card=manifest.draft.card))
    if lookup is not None:
        assert isinstance(manifest.draft, ModelDraft | RetokenizedDraft)
        manifest = replace(manifest, draft=NgramPlusDraft(ngram=lookup, other=manifest.draft))
    (path / "manifest.json").write_text(manifest.to_json())
    if latency:
        (path / "reports").mkdir()
        (path / "reports" / "latency.json").write_text(json.dumps(latency))
    return path


def _draft_vocab(draft: NDArray[Any] | NgramDraft | SkippedTable | None) -> int | None:
    """Of a draft model; None where q is over the target's tokens."""
    return draft.shape[1] if isinstance(draft, np.ndarray) else None


def _draft_card(
    draft: NDArray[Any] | NgramDraft | SkippedTable | None, target: ModelCard
) -> DraftCard | None:
    if isinstance(draft, np.ndarray):
        return ModelDraft(card=replace(target, vocab_size=draft.shape[1]))
    if isinstance(draft, SkippedTable):
        return LayerSkipDraft(skipped_layers=(0,))
    return draft


def _manifest(
    path: Path,
    vocab: int,
    draft: NDArray[Any] | NgramDraft | SkippedTable | None,
    limits: Limits,
    eos: tuple[int, ...],
) -> Manifest:
    files = {p.relative_to(path).as_posix(): _record(p) for p in path.rglob("*") if p.is_file()}
    card = ModelCard(
        name="tiny",
        model_type="table",
        revision="",
        sha256="0" * 64,
        parameters=STATES * vocab,
        precision="fp32",
        vocab_size=vocab,
        cache=CacheSpec(layers=1, kv_heads=1, head_dim=1, max_context=limits.max_context),
    )
    return Manifest(
        schema=SCHEMA,
        versions={},
        backend="onnxruntime",
        target=card,
        draft=_draft_card(draft, card),
        limits=limits,
        eos_token_ids=eos,
        bos_token_id=None,
        tokenizer_sha256=files["tokenizer.json"].sha256,
        gates=(),
        files=files,
    )


def _record(path: Path) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def latency_report(*, row: float, draft: float, max_draft_tokens: int = 4) -> dict[str, Any]:
    """A profile in units of one plain target step: `row` a verified row, `draft` a draft step."""
    counts = range(1, max_draft_tokens + 2)
    return {
        "hardware": "none",
        "versions": {},
        "context": 64,
        "verify_s": {str(n): 1 + row * (n - 1) for n in counts},
        "draft_s": draft,
        "draft_catch_up_s": draft * 1.1,
        "accept_s": {str(n - 1): 0.0 for n in counts},
        "overhead_s": 0.0,
    }


def logits_after(table: NDArray[Any], tokens: Sequence[int]) -> NDArray[Any]:
    """[vocab] what a table model says behind `tokens`, in NumPy."""
    weights = np.arange(len(tokens)) * 3 % 11 + 1
    return table[(int(np.dot(tokens, weights)) + 11 * tokens[-1]) % STATES]


def reference_greedy(table: NDArray[Any], prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(table, tokens).argmax()))
    return tokens[len(prompt) :]


def reference_sampled(
    target: NDArray[Any],
    draft: NDArray[Any],
    prompt: Sequence[int],
    count: int,
    k: int,
    params: SamplingParams,
    target_ids: NDArray[Any] | None = None,
) -> list[int]:
    """Speculative sampling in NumPy, from the definitions: the tokens that a Decoder must give."""
    assert params.seed is not None
    uniforms = uniform_table(params.seed, len(prompt) + count + k + 1)
    tokens = list(prompt)
    drafting = 0  # the first token comes from the prompt's own last row
    while len(tokens) < len(prompt) + count:
        start, q_rows = len(tokens), np.zeros((drafting, draft.shape[1]), np.float32)
        drafts = list(tokens)
        for i in range(drafting):
            logits, uniform = logits_after(draft, drafts), uniforms[DRAFT, start + i]
            token, q_rows[i], _ = draft_sample(logits, uniform, params, target_ids)
            drafts.append(token)
        rows = [logits_after(target, drafts[: start + i]) for i in range(drafting + 1)]
        decision = accept(
            np.stack(rows),
            np.array(drafts[start:], np.int64),
            q_rows,
            uniforms[ACCEPT, start : start + drafting],
            uniforms[DRAW, start : start + drafting + 1],
            params,
            target_ids,
        )
        tokens = [*drafts[: start + decision.num_accepted], decision.next_token]
        drafting = k
    return tokens[len(prompt) : len(prompt) + count]
