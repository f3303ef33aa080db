"""The factors that AWQ moved, as a graph's weights need them: who has what multiplied, or divided.

A layer's features were multiplied by s; rows of the layer before, or a norm's vectors, were divided
by it. Together nothing is changed but what rounding does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import write_arrays
from .folds import Fold

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Factors:
    """By the names that weights have in the graph, joined ones `a+b`; kept in a file."""

    path: Path
    features: dict[str, Array] = field(default_factory=dict)  # [in]: multiplied
    rows: dict[str, Array] = field(default_factory=dict)  # [out]: divided
    vectors: dict[str, Array] = field(default_factory=dict)  # divided

    def put(
        self, folds: Mapping[str, Fold], reads: Mapping[str, str], sizes: Mapping[str, int]
    ) -> None:
        """From s by layer, which `features` has: folds by value; reads, sizes (rows) by layer."""
        for layer, value in reads.items():
            fold, s = folds.get(value), self.features.get(layer)
            if fold is None or s is None:
                continue
            divisor = fold.shared(s)
            self.vectors.update(dict.fromkeys(fold.vectors, divisor))
            if fold.layer:
                whole = self.rows.setdefault(fold.layer, np.ones(sizes[fold.layer], np.float32))
                whole[fold.first : fold.first + len(divisor)] = divisor
        self._save()

    def recall(self) -> None:
        """Take over what the file has; nothing where there is none."""
        if not self.path.exists():
            return
        with np.load(self.path) as arrays:
            for key in arrays.files:
                kind, _, name = key.partition("|")
                getattr(self, kind)[name] = arrays[key]

    def _save(self) -> None:
        kinds = {"features": self.features, "rows": self.rows, "vectors": self.vectors}
        write_arrays(
            self.path, {f"{k}|{n}": array for k, kind in kinds.items() for n, array in kind.items()}
        )
