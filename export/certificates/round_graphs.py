"""The exporter's graphs, asked one decision at a time over a world's few tokens.

`small` builds both for the world's own vocabulary. `own` takes a bundle's accept graph as it is and
keeps a round within a few of its tokens: the others have logit −∞ and q 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from runtime.sampling_inputs import SamplingInputs
from runtime.tree import Tree

from ..accept_graph import accept_model
from ..draft_tail import append_draft_sampling
from .world import OUTPUT, PROMPT, Array, LawCase, Tokens, World, draft_row

STEPS = 2**24  # uniforms are multiples of 2⁻²⁴ below 1
Feed = dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a world's tokens lie in the graphs' vocabularies."""

    ids: Tokens  # the target's id of each token
    vocab: int
    columns: Tokens  # the draft's column of each of its tokens
    draft_vocab: int

    def spread(self, rows: Array, filler: float) -> Array:
        """[…, world vocab] → […, vocab]."""
        result = np.full((*rows.shape[:-1], self.vocab), filler, rows.dtype)
        result[..., list(self.ids)] = rows
        return result

    def inputs(self, case: LawCase, world: World, behind: list[Tokens]) -> Feed:
        """The contract's sampling inputs for rows that stand behind these prefixes."""
        bias = {self.ids[token]: value for token, value in case.params.logit_bias.items()}
        inputs = SamplingInputs(self.vocab, len(behind))
        inputs.begin(replace(case.params, logit_bias=bias), [self.ids[token] for token in PROMPT])
        inputs.commit(self.ids[token] for token in OUTPUT)
        if case.masked:
            inputs.shared["adjust"][0] = True
            mask = np.array([world.allowed(prefix) for prefix in behind])
            inputs.allowed[0] = self.spread(mask, filler=False)
        return {**inputs.shared, "allowed_tokens": inputs.allowed}


@dataclass(frozen=True, kw_only=True)
class RoundGraphs:
    """Sessions and where the tokens are; without a draft graph the reference drafts."""

    places: Places
    accept_session: ort.InferenceSession
    draft_session: ort.InferenceSession | None

    @classmethod
    def small(cls, world: World) -> Self:
        size = len(world.draft_ids)
        ids = np.array(world.draft_ids)
        d2t = None if world.drafts is None else ids - np.arange(size)
        everyone = tuple(range(world.vocab))
        return cls(
            places=Places(
                ids=everyone, vocab=world.vocab, columns=tuple(range(size)), draft_vocab=size
            ),
            accept_session=_session(accept_model(world.vocab, d2t, draft_vocab_size=size)),
            draft_session=_session(draft_tail_model(size, d2t, world.vocab)),
        )

    @classmethod
    def own(cls, accept: Path, places: Places) -> Self:
        options = _options()
        session = ort.InferenceSession(accept, options, providers=["CPUExecutionProvider"])
        return cls(places=places, accept_session=session, draft_session=None)

    def draft_step(self, case: LawCase, world: World, prefix: Tokens) -> DraftStep | StatedStep:
        if self.draft_session is None:
            return StatedStep(q=draft_row(case, world, prefix).astype(np.float32))
        feed = {
            "body": world.draft_logits(prefix)[None, None],
            "drafted_tokens": np.array([prefix], np.int64).reshape(1, -1),
            **self.places.inputs(case, world, [prefix]),
        }
        return DraftStep(session=self.draft_session, feed=feed, ids=world.draft_ids)

    def accept(
        self, case: LawCase, world: World, tokens: Tokens, probs: tuple[Array, ...]
    ) -> Accept:
        behind = [tokens[:i] for i in range(world.k + 1)]
        logits = np.array([world.target_logits(prefix) for prefix in behind])
        q = np.zeros((1, world.k, self.places.draft_vocab), np.float32)
        q[0][:, list(self.places.columns)] = np.array(probs).reshape(world.k, -1)
        feed = {
            "logits": self.places.spread(logits, filler=float("-inf"))[None],
            "draft_tokens": np.array([[self.places.ids[x] for x in tokens]], np.int64),
            "draft_probs": q,
            **chain(world.k),
            "past_lengths": np.zeros(1, np.int32),
            **self.places.inputs(case, world, behind),
        }
        return Accept(session=self.accept_session, feed=feed, ids=self.places.ids)


@dataclass(frozen=True, kw_only=True)
class StatedStep:
    """A draft that draws from q by definition."""

    q: Array  # [draft_vocab] f32

    def drawn(self, uniforms: Array) -> Array:
        total = np.cumsum(self.q, dtype=np.float64)
        return np.searchsorted(total / total[-1], uniforms, side="right")


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """One row of the draft's sampling tail."""

    session: ort.InferenceSession
    feed: Feed
    ids: Tokens

    @property
    def q(self) -> Array:
        zero = {"draft_uniforms": np.zeros(1, np.float32)}
        q: Array = self.session.run(["draft_step_probs"], self.feed | zero)[0][0, 0]
        return q

    def drawn(self, uniforms: Array) -> Array:
        """The draft's index of the token that each uniform draws."""
        batch = {name: np.repeat(value, len(uniforms), 0) for name, value in self.feed.items()}
        batch["draft_uniforms"] = uniforms
        return np.searchsorted(self.ids, self.session.run(["draft_token"], batch)[0][:, 0])


@dataclass(frozen=True, kw_only=True)
class Accept:
    """One round's inputs; only its uniforms change."""

    session: ort.InferenceSession
    feed: Feed
    ids: Tokens

    def accepted(self, uniforms: Array) -> Array:
        """Question i puts its uniform to draft i and lets every draft before it pass."""
        k = len(uniforms)
        table = np.zeros((k, k), np.float32)
        np.fill_diagonal(table, uniforms)
        return self._run(table, np.zeros((k, k + 1), np.float32))[0]

    def drawn(self, uniforms: Array, rows: Array) -> Array:
        """What each question draws in its row, where the last uniform there is ends the round.

        −1 where no uniform ends it there: such a row is never read.
        """
        k = self.feed["draft_tokens"].shape[1]
        accepts = np.where(np.arange(k) == rows[:, None], 1 - 1 / STEPS, 0).astype(np.float32)
        ended, token = self._run(accepts, np.repeat(uniforms[:, None], k + 1, 1))
        order = np.argsort(self.ids)
        found = order[np.searchsorted(self.ids, token, sorter=order)]
        return np.where(ended == rows, found, -1)

    def _run(self, accepts: Array, draws: Array) -> list[Array]:
        batch = {name: np.repeat(value, len(draws), 0) for name, value in self.feed.items()}
        batch |= {"accept_uniforms": accepts, "draw_uniforms": draws}
        result: list[Array] = self.session.run(["num_accepted", "next_token"], batch)
        return result


def chain(k: int) -> Feed:
    """k drafts one behind the other, each drawn from its row of q."""
    return {
        "parents": np.arange(k)[None],
        "q_rows": np.arange(k)[None],
        "visible": Tree.chain(k).visible[None],
    }


def draft_tail_model(size: int, d2t: Array | None, vocab: int) -> ir.Model:
    """The sampling tail behind a body that is an input."""
    body = ir.val("body", dtype=ir.DataType.FLOAT, shape=["batch", 1, size])
    node = ir.node("Identity", [body])
    logits = node.outputs[0]
    logits.name, logits.shape = "logits", body.shape
    logits.dtype = ir.DataType.FLOAT
    graph = ir.Graph([body], [logits], nodes=[node], opset_imports={"": 24}, name="draft")
    model = ir.Model(graph, ir_version=10)
    append_draft_sampling(model, d2t, vocab_size=vocab)
    return model


def _session(model: ir.Model) -> ort.InferenceSession:
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, _options(), providers=["CPUExecutionProvider"])


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return options
