"""Counter-based uniforms: a number depends on (seed, absolute position, purpose) and nothing else.

So a replay, another draft length, or requests in between draw the same numbers. `position` is the
index in the sequence of the token whose choice the number decides. A number is used by at most one
decision that counts: what a rejection discards was never looked at by an accept test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAFT, ACCEPT, DRAW = range(3)  # purposes: sample the draft, accept it, draw recovered or bonus


def accept_purpose(rank: int) -> int:
    """To accept a draft of this rank among its siblings."""
    return ACCEPT if rank == 0 else DRAW + rank


def uniform_table(seed: int, positions: int, width: int = 1) -> NDArray[Any]:
    """[purpose, position] f32 in [0, 1) for one sequence; seed from 0 to 2**64 - 1.

    width: of the widest tree, the number of siblings that may be put to the test at one position.

    Uses the raw output of Philox, which NumPy keeps stable, and not a Generator's methods, which
    it doesn't (NEP 19). 24 bits, so that no value rounds to 1.
    """
    # As uint64: NumPy reads a list of large integers through float64.
    keys = [np.array([seed, purpose], np.uint64) for purpose in range(DRAW + width)]
    rows = [np.random.Philox(key=key).random_raw(positions) for key in keys]
    return (np.stack(rows) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
