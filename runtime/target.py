"""The target's prebound step: prefill, plain decoding and verification through one graph.

Invariant: `length` rows of the cache are valid and belong to committed tokens; rows beyond it are
never read. Rollback is a smaller length. After a tree the rows of the accepted path are moved to
where a chain would have written them; all others are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .buffers import RoundBuffers
from .contract import SKIP_LAYERS, CacheSpec
from .executor import Buffers, Call, Executor, stacked_caches
from .features import FeatureStore
from .tree_buffers import TreeBuffers, chain_inputs

PREFILL_CHUNK = 128  # rows a call: enough to amortise the weights, small enough to cancel soon


class TargetStep:
    """The target graph over its own cache and the shared round buffers."""

    def __init__(
        self,
        executor: Executor,
        cache: CacheSpec,
        buffers: RoundBuffers,
        features: FeatureStore | None = None,  # where a drafter reads them
    ) -> None:
        self._executor = executor
        self._buffers = buffers
        self.features = features
        self._rows, self.caches = stacked_caches(cache.past(), cache.shape(1))
        names = zip(cache.past(), cache.present(), strict=True)
        self._present = {present.name: self.caches[past.name] for past, present in names}
        self.max_context = cache.max_context
        self._chunk = np.zeros((1, PREFILL_CHUNK), np.int64)
        self._calls: dict[tuple[int, int], Call] = {}
        self._trees: dict[int, Call] = {}
        self._verify = [
            self._bind(buffers.query(rows), rows) for rows in range(1, buffers.max_draft_tokens + 2)
        ]

    @property
    def length(self) -> int:
        return int(self._buffers.target_lengths[0])

    @length.setter
    def length(self, rows: int) -> None:
        self._buffers.target_lengths[0] = rows

    def verify(self, rows: int) -> float:
        """Logits of the last committed token and the drafts behind it: `rows` rows, one pass."""
        seconds = self._verify[rows - 1].run()
        self._keep_features(rows)
        return seconds

    def verify_tree(self, rows: int) -> float:
        """Logits of the last committed token and of the tree of drafts behind it in the buffers.

        `keep_path` must follow.
        """
        if rows not in self._trees:
            b = self._buffers
            self._trees[rows] = self._bind(b.query(rows), rows, tree=b.tree(rows - 1))
        return self._trees[rows].run()

    def keep_path(self, path: Sequence[int]) -> float:
        """Of the rows that a tree wrote behind `length`, keep row 0 and these, in their order.

        Returns the seconds it took. Ancestors stand in front of a row, so no row is overwritten
        before it is read.
        """
        start = perf_counter()
        first = self.length
        moved = [(first + 1 + i, first + row) for i, row in enumerate(path) if row != i + 1]
        if moved:
            self._executor.move_rows(self._rows, moved)
        if self.features is not None:
            self.features.keep_rows(first, [0, *path])
        return perf_counter() - start

    def joined_caches(self, count: int) -> list[NDArray[Any]]:
        """All caches, `count` of them in each array [1, count · heads, rows, size]."""
        heads, rows, size = self._rows.shape[2:]
        return list(self._rows.reshape(-1, 1, count * heads, rows, size))

    def prefill(self, tokens: Sequence[int]) -> float:
        """Append `tokens` (at most a chunk) to the cache; logits[0, 0] is the last one's row."""
        count = len(tokens)
        call = self._calls.get((count, 1))
        if call is None:
            call = self._calls[count, 1] = self._bind(self._chunk[:, :count], 1)
        self._chunk[0, :count] = tokens
        seconds = call.run()
        self._keep_features(count)
        self.length += count
        return seconds

    def _keep_features(self, rows: int) -> None:
        if self.features is not None:
            self.features.keep(self.length, rows)

    def bind_skipping(self, input_ids: NDArray[Any]) -> Call:
        """A pass behind `draft_lengths` rows through the layers that drafts keep.

        Leaves the last row's logits in logits[:, :1], where verification will write its own.
        """
        switches = {SKIP_LAYERS.name: np.array(True)}
        return self._bind(input_ids, 1, self._buffers.draft_lengths, switches)

    def _bind(
        self,
        input_ids: NDArray[Any],
        num_logits: int,
        lengths: NDArray[Any] | None = None,  # None: target_lengths
        switches: Buffers = MappingProxyType({}),
        tree: TreeBuffers | None = None,  # None: a chain
    ) -> Call:
        inputs: Buffers = {
            "input_ids": input_ids,
            "past_lengths": self._buffers.target_lengths if lengths is None else lengths,
            "num_logits": np.array(num_logits, np.int64),
            **(chain_inputs(input_ids.shape[1]) if tree is None else tree.inputs()),
            **switches,
            **self.caches,
        }
        outputs = {"logits": self._buffers.logits[:, :num_logits], **self._present}
        if self.features is not None:
            outputs["features"] = self.features.output(input_ids.shape[1])
        return self._executor.bind(inputs, outputs)
