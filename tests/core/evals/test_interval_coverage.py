"""How often the intervals of evals hold the true value: exactly, and in seeded simulation.

pass^k of tasks with chances p is 1 - pass@k of tasks with chances 1 - p (`test_eval_stats`), so
pass@k stands for both, and for k = 1 chances up to a half stand for all. The grid with more evals
of each cell, and with other intervals beside ours, is `benchmarks/bench_intervals.py`.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest

from telescope_core.evals.stats import mean_of_rewards, success_rate

NUM_EVALS = 32
TASKS = (20, 64, 200, 500)
CORRELATIONS = {"alike": 0.0, "beta 0.2": 0.2, "beta 0.6": 0.6}
EASY = 0.9
"""Chance of the easier of two kinds of tasks; that of the other is a quarter of the mean."""


class Cell(NamedTuple):
    """One population of tasks, and pass@k of it."""

    tasks: int
    rollouts: int
    k: int
    chance: float
    """Mean chance of success."""
    population: str

    @property
    def is_mirrored(self) -> bool:
        """Whether the two kinds of tasks are those of 1 - chance, with success for failure."""
        return self.population == "two kinds" and self.chance > 0.5

    @property
    def kinds(self) -> tuple[float, float, float]:
        """Share of the easier kind, and the chances of both, before they are mirrored."""
        mean = 1.0 - self.chance if self.is_mirrored else self.chance
        hard = mean / 4
        return (mean - hard) / (EASY - hard), EASY, hard

    @property
    def truth(self) -> float:
        """The exact pass@k of the population."""
        if self.population == "two kinds":
            share, *chances = self.kinds
            easy, hard = (p if self.is_mirrored else 1.0 - p for p in chances)
            return 1.0 - (share * easy**self.k + (1.0 - share) * hard**self.k)
        correlation, failure = CORRELATIONS[self.population], 1.0 - self.chance
        if correlation == 0.0:
            return 1.0 - failure**self.k
        size = 1.0 / correlation - 1.0
        return 1.0 - math.prod((failure * size + i) / (size + i) for i in range(self.k))

    @property
    def num_rare(self) -> float:
        """Tasks that are expected to differ from what most tasks are."""
        return self.tasks * min(self.truth, 1.0 - self.truth)

    def chances(self, rng: np.random.Generator) -> np.ndarray:
        """Return [evals, tasks] chances of success."""
        shape = (NUM_EVALS, self.tasks)
        if self.population == "two kinds":
            share, easy, hard = self.kinds
            drawn = np.where(rng.random(shape) < share, easy, hard)
            return 1.0 - drawn if self.is_mirrored else drawn
        correlation = CORRELATIONS[self.population]
        if correlation == 0.0:
            return np.full(shape, self.chance)
        size = 1.0 / correlation - 1.0
        return rng.beta(self.chance * size, (1.0 - self.chance) * size, shape)


def cells() -> list[Cell]:
    """Return every cell whose truth is not within 0.002 of 0 or 1."""
    every = [
        Cell(tasks, rollouts, k, chance, population)
        for tasks in TASKS
        for rollouts, k in ((4, 1), (16, 1), (4, 4), (16, 4))
        for chance in ((0.02, 0.2, 0.5) if k == 1 else (0.02, 0.2, 0.5, 0.9, 0.98))
        for population in (*CORRELATIONS, "two kinds")
    ]
    return [cell for cell in every if 0.002 <= cell.truth <= 0.998]


def num_held(cell: Cell) -> int:
    """Return in how many of NUM_EVALS evals the interval holds the truth."""
    rng = np.random.default_rng([cell.tasks, cell.rollouts, cell.k, round(100 * cell.chance)])
    known: dict[tuple[int, ...], bool] = {}
    held = 0
    for solved in np.sort(rng.binomial(cell.rollouts, cell.chances(rng)), axis=1).tolist():
        case = tuple(solved)
        if case not in known:
            estimate = success_rate([(cell.rollouts, c) for c in case], cell.k, every=False)
            known[case] = estimate.low <= cell.truth <= estimate.high
        held += known[case]
    return held


def error(num_evals: int, share: float = 0.95) -> float:
    """Return the standard error of a coverage that is measured in so many evals."""
    return math.sqrt(share * (1.0 - share) / num_evals)


@pytest.fixture(scope="module")
def measured() -> dict[Cell, int]:
    return {cell: num_held(cell) for cell in cells()}


def by_axis(measured: dict[Cell, int]) -> dict[tuple[str, object], tuple[float, int]]:
    """Return the coverage and the number of evals for each value of each axis, and over all."""
    groups: dict[tuple[str, object], list[int]] = defaultdict(list)
    for cell, held in measured.items():
        for name, value in (*cell._asdict().items(), ("all", "")):
            groups[name, value].append(held)
    return {
        about: (sum(counts) / (NUM_EVALS * len(counts)), NUM_EVALS * len(counts))
        for about, counts in groups.items()
    }


@pytest.mark.slow
def test_the_grid_is_whole(measured):
    assert len(measured) > 220
    for name, values in {"tasks": TASKS, "population": (*CORRELATIONS, "two kinds")}.items():
        assert {getattr(cell, name) for cell in measured} == set(values)


@pytest.mark.slow
def test_intervals_cover_along_every_axis_where_enough_tasks_differ(measured):
    """Between 93% and 97%, for each number of tasks, of rollouts, k, chance and population."""
    usual = by_axis({cell: held for cell, held in measured.items() if cell.num_rare >= 5})
    assert len(usual) == 4 + 2 + 2 + 5 + 4 + 1
    off = {
        about: share
        for about, (share, num_evals) in usual.items()
        if not 0.93 - 3 * error(num_evals) <= share <= 0.97 + 3 * error(num_evals)
    }
    assert not off
    assert 0.94 <= usual["all", ""][0] <= 0.965


@pytest.mark.slow
def test_intervals_are_rather_too_wide_where_few_tasks_differ(measured):
    rare = by_axis({cell: held for cell, held in measured.items() if cell.num_rare < 5})
    low = {about: one for about, one in rare.items() if one[0] < 0.94 - 3 * error(one[1])}
    assert not low


@pytest.mark.slow
def test_no_cell_of_the_grid_falls_out(measured):
    """Less than 87% would be seen in any cell, whatever kinds of tasks there are."""
    least = 0.87 - 3 * error(NUM_EVALS, 0.87)
    assert {cell: held for cell, held in measured.items() if held / NUM_EVALS < least} == {}


CHANCES = [percent / 100 for percent in range(2, 99)]


@pytest.mark.parametrize(
    ("tasks", "least", "share"), [(20, 0.937, 0.55), (64, 0.937, 0.93), (200, 0.929, 0.97)]
)
def test_the_coverage_of_single_rollouts_is_known_exactly(tasks, least, share):
    """`share` of all chances from 0.02 to 0.98 are covered by 93 to 97%, and none by less."""
    ends = []
    for solved in range(tasks + 1):
        counts = [(1, 1)] * solved + [(1, 0)] * (tasks - solved)
        estimate = success_rate(counts, 1, every=False)
        ends.append((estimate.low, estimate.high))
    covered = [
        math.fsum(
            math.comb(tasks, solved) * chance**solved * (1.0 - chance) ** (tasks - solved)
            for solved, (low, high) in enumerate(ends)
            if low <= chance <= high
        )
        for chance in CHANCES
    ]
    assert min(covered) >= least
    assert sum(0.93 <= one <= 0.97 for one in covered) >= share * len(covered)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.05, 0.1])
@pytest.mark.parametrize(("num_tasks", "rollouts"), [(20, 1), (20, 4), (64, 1), (64, 4)])
@pytest.mark.parametrize("are_alike", [True, False])
def test_rewards_with_partial_credit_are_covered_where_few_tasks_are_solved(
    share, num_tasks, rollouts, are_alike
):
    """Most answers get 0.1 for their form; without imagined tasks, 62 of 100 were covered."""
    rng = np.random.default_rng(num_tasks + rollouts)
    values, chances = np.array([1.0, 0.1, 0.0]), [share, 0.6, 0.4 - share]
    truth, held = float(values @ chances), 0
    for _ in range(200):
        drawn = rng.choice(values, size=(num_tasks, rollouts if are_alike else 1), p=chances)
        rewards = drawn if are_alike else np.repeat(drawn, rollouts, axis=1)
        found = mean_of_rewards(rewards.tolist())
        held += found.low <= truth <= found.high
    assert held / 200 >= 0.88


def test_rounding_is_no_spread_between_tasks():
    found = mean_of_rewards([[0.3] * 3, [0.3] * 2, [0.1, 0.2, 0.6], [0.4, 0.2]])
    assert found.high - found.low > 0.3
