"""A tree of query rows in one call: each row's logits are those behind its own path alone.

Held against the eager model, as traced and as lowered: windows, soft caps, learned positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from family_configs import FAMILIES, MAX_CONTEXT
from helpers_family import bind, eager_logits, lowered, random_model, text
from transformers import PretrainedConfig

from engines.external_data import WeightStore, save
from engines.onnxruntime.lowering import make_rows_alike
from export.portable import make_portable
from export.precision import precision
from export.trace import cache_spec, trace_decoder
from runtime.contract import target_graph
from runtime.executor import EngineOptions, Executor, cache_buffers
from runtime.tree import Tree
from runtime.tree_buffers import TreeBuffers

LIMIT = 5e-5  # of logits of size 1 to 5
TREE = Tree((0, 0, 1, 1, 2, 5, 4))
PAST = 14  # more than the window, so that it cuts within the past and within the tree
NAMES = ("llama", "gemma2")  # the latter with a window and a soft cap
MORE = ("mistral-window", "gpt2", "phi")


class Target:
    """A written target over caches of its own."""

    def __init__(self, path: Path, config: PretrainedConfig) -> None:
        cache = cache_spec(config, MAX_CONTEXT)
        self._graph = Executor.load(path, target_graph(cache), EngineOptions(threads=1))
        self._past = cache_buffers(cache.past(), cache.shape(1))
        pairs = zip(cache.past(), cache.present(), strict=True)
        self._present = {present.name: self._past[past.name] for past, present in pairs}
        self._vocab = config.vocab_size
        self.length = 0

    def rows(self, tokens: Sequence[int], tree: Tree | None = None) -> np.ndarray:
        count = len(tokens)
        logits = np.zeros((1, count, self._vocab), np.float32)
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "past_lengths": np.array([self.length], np.int32),
            "num_logits": np.array(count, np.int64),
            **TreeBuffers.of(tree or Tree.chain(count - 1)).inputs(),
            **self._past,
        }
        self._graph.bind(inputs, {"logits": logits, **self._present}).run()
        return logits[0]


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_every_row_is_behind_its_own_path(tmp_path: Path, name: str) -> None:
    config = next(family for family in FAMILIES if family.name == name).config()
    model = random_model(config)
    graph = make_portable(trace_decoder(config, MAX_CONTEXT, trees=True))
    portable = graph.clone()
    bind(portable, model)
    lower = lowered(graph, model, precision("fp32"))
    variants = {"portable": portable, "lowered": lower, "alike": make_rows_alike(lower.clone())}
    tokens, drafts = text(PAST + 1, config.vocab_size), text(40, config.vocab_size)[-TREE.size :]
    expected = [
        eager_logits(model, [*tokens, *(drafts[at - 1] for at in TREE.path(row))])[-1]
        for row in range(TREE.size + 1)
    ]
    for kind, variant in variants.items():
        (tmp_path / kind).mkdir()
        save(variant, "target", WeightStore(directory=tmp_path / kind))
        target = Target(tmp_path / kind / "target.onnx", config)
        target.rows(tokens[:-1])
        target.length = PAST
        found = target.rows([tokens[-1], *drafts], TREE)
        assert np.abs(found - expected).max() < LIMIT, kind
        chained = target.rows([tokens[-1], *drafts])  # each row sees its siblings, too
        assert np.abs(chained - expected)[2:].max(1).min() > 10 * LIMIT, kind
        alone = target.rows(tokens[-1:])
        assert np.abs(alone[0] - expected[0]).max() < LIMIT, kind
