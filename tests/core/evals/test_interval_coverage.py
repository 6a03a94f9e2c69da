"""How often the intervals of evals hold the true value, in simulation with fixed seeds.

The whole grid, with other intervals beside ours, is `benchmarks/bench_intervals.py`.
"""

import math
from typing import NamedTuple

import numpy as np

from telescope_core.evals.stats import success_rate

NUM_EVALS = 200
NOISE = 3.0 * math.sqrt(0.95 * 0.05 / NUM_EVALS)
"""Three standard errors of a measured coverage."""


class Cell(NamedTuple):
    """Tasks whose chances of success are beta distributed; correlation 0 = all alike."""

    tasks: int
    rollouts: int
    k: int
    every: bool
    mean: float
    correlation: float

    @property
    def truth(self) -> float:
        """The exact pass@k or pass^k of the population."""
        chance = self.mean if self.every else 1.0 - self.mean
        if self.correlation == 0.0:
            power = chance**self.k
        else:
            size = 1.0 / self.correlation - 1.0
            power = math.prod((chance * size + i) / (size + i) for i in range(self.k))
        return power if self.every else 1.0 - power

    @property
    def num_rare(self) -> float:
        """Tasks that are expected to differ from what most tasks are."""
        return self.tasks * min(self.truth, 1.0 - self.truth)


CELLS = [
    Cell(tasks, rollouts, k, every, mean, correlation)
    for tasks in (20, 64, 200, 500)
    for rollouts, k in ((1, 1), (4, 1), (16, 1), (16, 4))
    for every in ((False,) if k == 1 else (False, True))
    for mean in (0.02, 0.2, 0.5, 0.9, 0.98)
    for correlation in ((0.0,) if rollouts == 1 else (0.0, 0.2, 0.6))
    # Every eighth one, which keeps the test short; all axes stay covered.
    if (tasks + 7 * rollouts + 3 * k + round(50 * mean) + round(10 * correlation) + every) % 8 == 0
]


def counts_of(cell: Cell, rng: np.random.Generator) -> np.ndarray:
    """Return [evals, tasks] numbers of solved rollouts."""
    shape = (NUM_EVALS, cell.tasks)
    if cell.correlation == 0.0:
        chances = np.full(shape, cell.mean)
    else:
        size = 1.0 / cell.correlation - 1.0
        chances = rng.beta(cell.mean * size, (1.0 - cell.mean) * size, shape)
    return rng.binomial(cell.rollouts, chances)


def coverage(cell: Cell) -> float:
    rng = np.random.default_rng([cell.tasks, cell.rollouts, cell.k, round(100 * cell.mean)])
    known: dict[tuple[int, ...], bool] = {}
    held = 0
    for solved in np.sort(counts_of(cell, rng), axis=1).tolist():
        case = tuple(solved)
        if case not in known:
            estimate = success_rate([(cell.rollouts, c) for c in case], cell.k, every=cell.every)
            known[case] = estimate.low <= cell.truth <= estimate.high
        held += known[case]
    return held / NUM_EVALS


def test_success_rates_cover_as_often_as_they_say():
    measured = {cell: coverage(cell) for cell in CELLS}
    usual = {cell: share for cell, share in measured.items() if cell.num_rare >= 5}
    rare = {cell: share for cell, share in measured.items() if cell.num_rare < 5}
    assert len(usual) > 20
    assert len(rare) > 10
    # docs/design/021-intervals.md says why the bound is lower, and one-sided, with rare tasks.
    bad = {cell: share for cell, share in usual.items() if not 0.93 - NOISE <= share <= 0.985}
    bad |= {cell: share for cell, share in rare.items() if share < 0.88 - NOISE}
    assert not bad
    assert 0.94 <= np.mean(list(usual.values())) <= 0.965
