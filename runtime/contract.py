"""Names, axes and types of every tensor that crosses a graph's boundary: the one place for them.

The exporter builds graphs to this contract, the runtime binds buffers by it, and `check` compares
a graph with it, so the two sides cannot drift apart. A symbolic axis has the same size wherever it
appears in one call.

State lives in tensors: a row's committed length is `past_lengths`, positions and masks are
computed from it inside the graph, and rollback is a smaller length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .errors import EngineError


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a graph: axes are names (symbolic) or integers (fixed when built)."""

    name: str
    dtype: str  # numpy name
    axes: tuple[str | int, ...]
    # An output that a graph need not have, nor a caller bind; an input that a graph need not have.
    optional: bool = False


def _spec(name: str, dtype: str, *axes: str | int) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, axes=axes)


INPUT_IDS = _spec("input_ids", "int64", "batch", "query_len")
PAST_LENGTHS = _spec("past_lengths", "int32", "batch")  # rows of the cache that are valid
# Of a target that verifies trees: where each of the call's rows stands in one. Column j of
# `visible` is cache row past_lengths - (tree_len - query_len) + j; all rows before those are seen.
# A row at depth d stands at the position of the first column plus d. A chain sees itself and all
# before it, at depths 0, 1, 2, …
BRANCH_WIDTH = 8  # tokens that a branch graph ranks behind a row
MOST_TREE_NODES = 64  # besides the root; sliding windows are built with so much room
DEPTHS = _spec("depths", "int64", "batch", "tree_len")
VISIBLE = _spec("visible", "bool", "batch", "query_len", "tree_len")
TARGET_DEPTHS, TARGET_VISIBLE = replace(DEPTHS, optional=True), replace(VISIBLE, optional=True)
NUM_LOGITS = _spec("num_logits", "int64")  # how many of the last query rows are projected
LOGITS = _spec("logits", "float32", "batch", "num_logits", "vocab")
# The target's hidden states that a head drafts from, those of one row joined; of every query row.
FEATURES = _spec("features", "float32", "batch", "query_len", "feature_width")
TARGET_FEATURES = replace(FEATURES, optional=True)
# Of a target that drafts for itself: leave out the layers that its drafts do without.
SKIP_LAYERS = _spec("skip_layers", "bool")

# Sampling parameters, one value a row; the same tensors feed the draft step and accept.
TEMPERATURE = _spec("temperature", "float32", "batch")  # 0 is greedy
TOP_K = _spec("top_k", "int64", "batch")  # 0 keeps all
TOP_P = _spec("top_p", "float32", "batch")  # 1 keeps all
MIN_P = _spec("min_p", "float32", "batch")  # 0 keeps all
SAMPLING = (TEMPERATURE, TOP_K, TOP_P, MIN_P)

# What changes a row's logits before temperature. A row whose `adjust` is false holds neutral values
# (penalties 1, 0, 0; bias 0; nothing seen; all allowed), and a batch of such rows reads none of it.
ADJUST = _spec("adjust", "bool", "batch")
REPETITION_PENALTY = _spec("repetition_penalty", "float32", "batch")  # 1 changes nothing
PRESENCE_PENALTY = _spec("presence_penalty", "float32", "batch")  # 0 changes nothing
FREQUENCY_PENALTY = _spec("frequency_penalty", "float32", "batch")  # 0 changes nothing
LOGIT_BIAS = _spec("logit_bias", "float32", "batch", "vocab")
SEEN_TOKENS = _spec("seen_tokens", "bool", "batch", "vocab")  # in the prompt or committed
OUTPUT_COUNTS = _spec("output_counts", "float32", "batch", "vocab")  # committed behind the prompt
ADJUSTING = (
    ADJUST,
    REPETITION_PENALTY,
    PRESENCE_PENALTY,
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    SEEN_TOKENS,
    OUTPUT_COUNTS,
)
# Grammar, bans and minimum length as one mask; a row of it for each row of logits.
ALLOWED_TOKENS = _spec("allowed_tokens", "bool", "batch", "k_plus_1", "vocab")
DRAFT_ALLOWED_TOKENS = _spec("allowed_tokens", "bool", "batch", 1, "vocab")
DRAFTED = _spec("drafted_tokens", "int64", "batch", "drafted")  # earlier in this round, target ids

DRAFT_UNIFORMS = _spec("draft_uniforms", "float32", "batch")
# The tree of a round's k drafts: row 0 is the last committed token, row i + 1 draft i, and no row
# stands before its parent. Of the drafts behind one row at most one was drawn from a q, the last;
# the others are certain, and no two are the same token.
PARENTS = _spec("parents", "int64", "batch", "k")  # the row that each draft follows
Q_ROWS = _spec("q_rows", "int64", "batch", "k")  # of draft_probs that it was drawn from; −1: none
ANCESTORS = _spec("visible", "bool", "batch", "k_plus_1", "k_plus_1")
ACCEPT_UNIFORMS = _spec("accept_uniforms", "float32", "batch", "k")
DRAW_UNIFORMS = _spec("draw_uniforms", "float32", "batch", "k_plus_1")

DRAFT_SAMPLING = (DRAFT_UNIFORMS, *SAMPLING, *ADJUSTING, DRAFT_ALLOWED_TOKENS, DRAFTED)

# The draft step's outputs; ids are the target's, q is over the draft vocabulary.
DRAFT_TOKEN = _spec("draft_token", "int64", "batch", 1)
DRAFT_STEP_PROBS = _spec("draft_step_probs", "float32", "batch", 1, "draft_vocab")
# A head's own: what stands in for the target's state at a row that the target hasn't seen yet.
STATES = _spec("states", "float32", "batch", "query_len", "state_width")
NEXT_STATE = _spec("next_state", "float32", "batch", 1, "state_width")
# Of the last row, from every head.
HEAD_LOGITS = _spec("head_logits", "float32", "batch", "num_heads", "head_vocab")
RANK_LOGITS = _spec("logits", "float32", "batch", "num_logits", "head_vocab")
TAIL_LOGITS = _spec("logits", "float32", "batch", 1, "head_vocab")
# What may follow some rows, the likeliest first, for trees: the draft's own law, no transforms.
TOP_TOKENS = _spec("top_tokens", "int64", "batch", "num_logits", BRANCH_WIDTH)  # target ids
TOP_PROBS = _spec("top_probs", "float32", "batch", "num_logits", BRANCH_WIDTH)
NEXT_STATES = _spec("next_state", "float32", "batch", "num_logits", "state_width")
# The same, stacked over the k steps of a round, as accept reads them.
DRAFT_TOKENS = _spec("draft_tokens", "int64", "batch", "k")
DRAFT_PROBS = _spec("draft_probs", "float32", "batch", "num_q_rows", "draft_vocab")
VERIFY_LOGITS = _spec("logits", "float32", "batch", "k_plus_1", "vocab")

NUM_ACCEPTED = _spec("num_accepted", "int64", "batch")
NEXT_TOKEN = _spec("next_token", "int64", "batch")  # recovered or bonus
LAST_ROW = _spec("last_row", "int64", "batch")  # of the last accepted draft; 0: the root
NEW_LENGTHS = _spec("new_lengths", "int32", "batch")  # past_lengths + num_accepted + 1


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Geometry of one KV cache: `layers` pairs of [batch, kv_heads, max_context, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int
    max_context: int
    dtype: str = "float32"

    def past(self) -> tuple[TensorSpec, ...]:
        return self._pairs("past_key_values")

    def present(self) -> tuple[TensorSpec, ...]:
        return self._pairs("present")

    def shape(self, batch: int) -> tuple[int, int, int, int]:
        return (batch, self.kv_heads, self.max_context, self.head_dim)

    def bytes(self, batch: int) -> int:
        itemsize = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}[self.dtype]
        b, h, n, d = self.shape(batch)
        return 2 * self.layers * b * h * n * d * itemsize

    def _pairs(self, prefix: str) -> tuple[TensorSpec, ...]:
        axes = ("batch", self.kv_heads, self.max_context, self.head_dim)
        return tuple(
            TensorSpec(name=f"{prefix}.{layer}.{part}", dtype=self.dtype, axes=axes)
            for layer in range(self.layers)
            for part in ("key", "value")
        )


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """Inputs and outputs of one graph.

    switches: inputs with a default in the graph, which only who knows of them gives.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    switches: tuple[TensorSpec, ...] = ()


def target_graph(cache: CacheSpec, switches: tuple[TensorSpec, ...] = ()) -> GraphSpec:
    """Prefill, plain decoding and verification: one graph, told apart by query_len."""
    return GraphSpec(
        inputs=(
            INPUT_IDS,
            PAST_LENGTHS,
            NUM_LOGITS,
            TARGET_DEPTHS,
            TARGET_VISIBLE,
            *cache.past(),
        ),
        outputs=(LOGITS, *cache.present(), TARGET_FEATURES),
        switches=switches,
    )


def draft_graph(cache: CacheSpec) -> GraphSpec:
    """One draft step: the token(s) that the draft has not seen in, one sampled token and q out."""
    return GraphSpec(
        inputs=(INPUT_IDS, PAST_LENGTHS, *DRAFT_SAMPLING, *cache.past()),
        outputs=(DRAFT_TOKEN, DRAFT_STEP_PROBS, *cache.present()),
    )


def draft_decoder_graph(cache: CacheSpec) -> GraphSpec:
    """The draft step without its end, which is `tail_graph`."""
    return GraphSpec(
        inputs=(INPUT_IDS, PAST_LENGTHS, *cache.past()), outputs=(TAIL_LOGITS, *cache.present())
    )


def branch_graph(cache: CacheSpec) -> GraphSpec:
    """The draft over rows of a tree, or a chain that it has not seen: what may follow the last
    `num_logits` of them."""
    return GraphSpec(
        inputs=(INPUT_IDS, PAST_LENGTHS, NUM_LOGITS, DEPTHS, VISIBLE, *cache.past()),
        outputs=(TOP_TOKENS, TOP_PROBS, *cache.present()),
    )


def eagle_branch_graph(cache: CacheSpec) -> GraphSpec:
    """The same of an EAGLE head, whose rows are pairs of a token and the state before it."""
    return GraphSpec(
        inputs=(INPUT_IDS, STATES, PAST_LENGTHS, NUM_LOGITS, DEPTHS, VISIBLE, *cache.past()),
        outputs=(TOP_TOKENS, TOP_PROBS, NEXT_STATES, *cache.present()),
    )


def rank_graph() -> GraphSpec:
    """Logits of some rows, or of Medusa's heads → what each ranks first."""
    return GraphSpec(inputs=(RANK_LOGITS,), outputs=(TOP_TOKENS, TOP_PROBS))


def fuse_graph() -> GraphSpec:
    """The target's features of a row → the state that an EAGLE-3 head starts from."""
    return GraphSpec(inputs=(FEATURES,), outputs=(STATES,))


def eagle_graph(cache: CacheSpec) -> GraphSpec:
    """One step of an EAGLE head: row i pairs token i + 1 with the state at i; one token, q and the
    last row's own state out, which the next step pairs with that token."""
    return GraphSpec(
        inputs=(INPUT_IDS, STATES, PAST_LENGTHS, *DRAFT_SAMPLING, *cache.past()),
        outputs=(DRAFT_TOKEN, DRAFT_STEP_PROBS, NEXT_STATE, *cache.present()),
    )


def heads_graph() -> GraphSpec:
    """Medusa: the target's state at one row → the logits of each head."""
    return GraphSpec(inputs=(FEATURES,), outputs=(HEAD_LOGITS,))


def tail_graph() -> GraphSpec:
    """The end of a draft step alone, behind a row of logits that the target's own graph made."""
    return GraphSpec(inputs=(TAIL_LOGITS, *DRAFT_SAMPLING), outputs=(DRAFT_TOKEN, DRAFT_STEP_PROBS))


def accept_graph() -> GraphSpec:
    """Acceptance and the recovered or bonus draw over a tree of k drafts, or a chain of them; k = 0
    is a plain sampling step."""
    return GraphSpec(
        inputs=(
            VERIFY_LOGITS,
            DRAFT_TOKENS,
            DRAFT_PROBS,
            PARENTS,
            Q_ROWS,
            ANCESTORS,
            ACCEPT_UNIFORMS,
            DRAW_UNIFORMS,
            PAST_LENGTHS,
            *SAMPLING,
            *ADJUSTING,
            ALLOWED_TOKENS,
        ),
        outputs=(NUM_ACCEPTED, NEXT_TOKEN, LAST_ROW, NEW_LENGTHS),
    )


def check_tensor(
    spec: TensorSpec, dtype: str, shape: Sequence[object], axes: dict[str, int]
) -> None:
    """Compare one tensor with its spec; `axes` collects the sizes of symbolic axes.

    Raises EngineError naming the tensor, what was received and what was expected.
    """
    fits = dtype == spec.dtype and len(shape) == len(spec.axes)
    for size, axis in zip(shape, spec.axes, strict=False):
        if isinstance(axis, int):
            fits = fits and size == axis
        elif isinstance(size, int):
            fits = fits and axes.setdefault(axis, size) == size
    if not fits:
        raise EngineError(
            f"{spec.name}: received {dtype} {list(shape)}. Expected {spec.dtype} "
            f"{list(spec.axes)} with {axes}; the graph and this runtime are of different "
            "versions: rebuild the bundle."
        )


def check_graph(
    spec: GraphSpec,
    inputs: Mapping[str, tuple[str, Sequence[object]]],
    outputs: Mapping[str, tuple[str, Sequence[object]]],
    where: str,
) -> dict[str, int]:
    """Compare a graph's signature, name → (dtype, shape), with the contract.

    Returns the fixed sizes of symbolic axes that the graph states (vocab, draft_vocab).
    """
    axes: dict[str, int] = {}
    for side, specs, received in (
        ("input", (*spec.inputs, *spec.switches), inputs),
        ("output", spec.outputs, outputs),
    ):
        required = {s.name for s in specs if not s.optional}
        missing, unexpected = required - set(received), set(received) - {s.name for s in specs}
        if missing or unexpected:
            raise EngineError(
                f"{where}: {side}s missing {sorted(missing)}, unexpected {sorted(unexpected)}; "
                "rebuild the bundle."
            )
        for tensor in specs:
            if tensor.name in received:
                check_tensor(tensor, *received[tensor.name], axes)
    return axes
