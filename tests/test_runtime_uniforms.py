"""Numbers that decide tokens: fixed for ever by seed, position and purpose."""

from __future__ import annotations

import numpy as np

from runtime.uniforms import ACCEPT, DRAFT, DRAW, uniform_table


def test_a_number_depends_on_seed_position_and_purpose_alone() -> None:
    short, long = uniform_table(7, 10), uniform_table(7, 5000)
    np.testing.assert_array_equal(short, long[:, :10])
    others = [uniform_table(8, 5000), uniform_table(2**64 - 1, 5000), long]
    rows = [table[purpose] for table in others for purpose in (DRAFT, ACCEPT, DRAW)]
    for i, a in enumerate(rows):
        for b in rows[:i]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.08  # 5.6 sigma of 1 / sqrt(5000)


def test_they_are_the_same_on_every_machine_and_version() -> None:
    expected = [
        [0.33472365140914917, 0.5897301435470581],
        [0.1775617003440857, 0.7027945518493652],
        [0.4385817050933838, 0.8705351948738098],
    ]
    assert uniform_table(1234, 2).tolist() == expected


def test_they_are_uniform_below_one() -> None:
    table = uniform_table(0, 100_000)
    assert table.dtype == np.float32
    assert table.min() >= 0
    assert table.max() < 1
    # Mean of 300,000 uniforms: sigma 5.3e-4; the bound is 5 sigma.
    assert abs(table.mean() - 0.5) < 2.7e-3
