"""The benchmark of recording: what it concludes from the times of blocks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bench_recording import Block, cost_of

# The benchmark imports what trains.
pytestmark = pytest.mark.slow


def test_the_cost_is_the_mean_over_pairs_whatever_their_order_and_their_length():
    blocks = []
    for number, base_s in enumerate((1.0, 4.0, 2.0, 8.0)):
        off = Block(is_on=False, wall_s=base_s, cpu_s=1.0)
        on = Block(is_on=True, wall_s=base_s * 1.02, cpu_s=1.0 + number / 100)
        blocks += [on, off] if number % 2 else [off, on]
    cost = cost_of(blocks, "wall_s")
    assert cost.mean == pytest.approx(2.0)
    assert (cost.low, cost.high) == (pytest.approx(2.0), pytest.approx(2.0))
    cost = cost_of(blocks, "cpu_s")
    assert cost.low < cost.mean < cost.high
    assert cost.mean == pytest.approx(1.5, abs=0.02)
    assert (cost.off_s, cost.on_s) == (1.0, pytest.approx(1.015))
