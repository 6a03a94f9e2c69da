"""How often 95% intervals of pass@1, pass@k and pass^k hold the true value, and how wide they are.

Tasks are drawn from populations of which the truth is known: all alike, with beta distributed
chances of success, or of two kinds. pass@k at a chance p is 1 - pass^k at 1 - p, for every interval
here, so chances above a half are not repeated. Peers: Student's t over tasks; Wilson's interval
with the effective number of tasks and t; the percentile bootstrap over tasks.
Run: python benchmarks/bench_intervals.py
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from machine import facts_of_run, table, write_results

from telescope_core.evals.distributions import t_quantile
from telescope_core.evals.stats import pass_all_k, pass_at_k, success_rate

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_intervals.py"
TASKS, NUM_EVALS, NUM_RESAMPLES = (20, 50, 200, 500), 500, 500
ROLLOUTS = {1: (1,), 4: (1, 4), 16: (1, 4, 16)}
CHANCES = (0.02, 0.1, 0.3, 0.5)
CORRELATIONS = {"alike": 0.0, "beta 0.1": 0.1, "beta 0.3": 0.3, "beta 0.6": 0.6}
EASY = 0.9
"""Chance of the easier of two kinds of tasks; that of the other is a quarter of the mean."""

Interval = tuple[float, float]
Method = Callable[[np.ndarray, np.ndarray, np.ndarray], Interval]


class Cell(NamedTuple):
    """One population, and one measure of it."""

    tasks: int
    rollouts: int
    k: int
    every: bool
    chance: float
    population: str

    def chances(self, rng: np.random.Generator) -> np.ndarray:
        """Return the tasks' chances of success in one eval."""
        if self.population == "two kinds":
            return np.where(rng.random(self.tasks) < self.share_easy, EASY, self.chance / 4)
        correlation = CORRELATIONS[self.population]
        if correlation == 0.0:
            return np.full(self.tasks, self.chance)
        size = 1.0 / correlation - 1.0
        return rng.beta(self.chance * size, (1.0 - self.chance) * size, self.tasks)

    @property
    def share_easy(self) -> float:
        """Share of the easier of two kinds of tasks."""
        return (self.chance - self.chance / 4) / (EASY - self.chance / 4)

    @property
    def truth(self) -> float:
        """The exact value of the measure over the population."""
        power = self._mean_power(every=True) if self.every else 1.0 - self._mean_power(every=False)
        return power

    def _mean_power(self, *, every: bool) -> float:
        """Return E[p^k], or E[(1 - p)^k] unless `every`."""

        def side(p: float) -> float:
            return p if every else 1.0 - p

        if self.population == "two kinds":
            easy = self.share_easy * side(EASY) ** self.k
            return easy + (1.0 - self.share_easy) * side(self.chance / 4) ** self.k
        correlation, mean = CORRELATIONS[self.population], side(self.chance)
        if correlation == 0.0:
            return mean**self.k
        size = 1.0 / correlation - 1.0
        return math.prod((mean * size + i) / (size + i) for i in range(self.k))

    @property
    def num_rare(self) -> float:
        """Expected number of tasks, of always-or-never ones, that differ from most."""
        return self.tasks * min(self.truth, 1.0 - self.truth)


def cells() -> Iterator[Cell]:
    """Yield every cell whose truth is not within 0.002 of 0 or 1."""
    for tasks in TASKS:
        for rollouts, ks in ROLLOUTS.items():
            for k in ks:
                for every in (False, True) if k > 1 else (False,):
                    for chance in CHANCES:
                        for population in (*CORRELATIONS, "two kinds"):
                            cell = Cell(tasks, rollouts, k, every, chance, population)
                            is_repeated = rollouts == 1 and population != "alike"
                            if not is_repeated and 0.002 <= cell.truth <= 0.998:
                                yield cell


def by_t(histogram: np.ndarray, values: np.ndarray, _: np.ndarray) -> Interval:
    """Student's t over tasks, cut at 0 and 1."""
    tasks = histogram.sum()
    mean = float(histogram @ values / tasks)
    variance = float(histogram @ (values - mean) ** 2 / (tasks - 1))
    reach = t_quantile(0.975, int(tasks) - 1) * math.sqrt(variance / tasks)
    return max(0.0, mean - reach), min(1.0, mean + reach)


def by_wilson(histogram: np.ndarray, values: np.ndarray, _: np.ndarray) -> Interval:
    """Wilson's interval with the number of tasks divided by the variance that is seen."""
    tasks = histogram.sum()
    mean = float(histogram @ values / tasks)
    room = mean * (1.0 - mean)
    variance = float(histogram @ (values - mean) ** 2 / (tasks - 1))
    effective = tasks * room / variance if variance > 0.0 else tasks
    square = t_quantile(0.975, int(tasks) - 1) ** 2
    middle = mean + square / (2 * effective)
    reach = math.sqrt(square * (room / effective + square / (4 * effective**2)))
    scale = 1.0 + square / effective
    return (middle - reach) / scale, (middle + reach) / scale


def by_bootstrap(histogram: np.ndarray, values: np.ndarray, draws: np.ndarray) -> Interval:
    """The 2.5% and 97.5% points of the mean over tasks drawn with replacement."""
    low, high = np.quantile(draws @ values / histogram.sum(), (0.025, 0.975))
    return float(low), float(high)


PEERS: dict[str, Method] = {"t": by_t, "wilson": by_wilson, "bootstrap": by_bootstrap}
NAMES = ("ours", *PEERS)
_HEAD = ["tasks", "rollouts", "measure", "chance", "population", "truth", *NAMES]


def measure(cell: Cell) -> dict[str, Any]:
    """Return the coverage and mean width of each interval, over NUM_EVALS evals."""
    rng = np.random.default_rng([cell.tasks, cell.rollouts, cell.k, int(100 * cell.chance)])
    estimator = pass_all_k if cell.every else pass_at_k
    counts = range(cell.rollouts + 1)
    values = np.array([estimator(cell.rollouts, c, cell.k) for c in counts])
    held, width = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0.0)
    for _ in range(NUM_EVALS):
        solved = rng.binomial(cell.rollouts, cell.chances(rng))
        estimate = success_rate([(cell.rollouts, int(c)) for c in solved], cell.k, every=cell.every)
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        intervals: dict[str, Interval] = {"ours": (estimate.low, estimate.high)}
        histogram = np.bincount(solved, minlength=cell.rollouts + 1)
        draws = rng.multinomial(cell.tasks, histogram / cell.tasks, size=NUM_RESAMPLES)
        intervals |= {name: peer(histogram, values, draws) for name, peer in PEERS.items()}
        for name, (low, high) in intervals.items():
            held[name] += low <= cell.truth <= high
            width[name] += (high - low) / NUM_EVALS
    return {
        **cell._asdict(),
        "truth": cell.truth,
        "num_rare": cell.num_rare,
        "coverage": {name: held[name] / NUM_EVALS for name in NAMES},
        "width": width,
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return one line for each interval: how often, how far off, and how wide it is."""
    lines: list[list[str]] = []
    for name in NAMES:
        shares = [row["coverage"][name] for row in rows]
        widths = [row["width"][name] / row["width"]["ours"] for row in rows]
        lines.append(
            [
                name,
                f"{statistics.mean(shares):.3f}",
                f"{min(shares):.3f}",
                f"{sum(share < 0.93 for share in shares) / len(shares):.1%}",
                f"{sum(0.93 <= share <= 0.97 for share in shares) / len(shares):.1%}",
                f"{sum(share > 0.97 for share in shares) / len(shares):.1%}",
                f"{statistics.mean(widths):.2f}",
            ]
        )
    return lines


def main() -> None:
    """Measure every cell, and write the results."""
    facts = facts_of_run(COMMAND, "telescope-core", "numpy")
    rows = [measure(cell) for cell in cells()]
    head = ["interval", "mean", "least", "below 93%", "93 to 97%", "above 97%", "width"]
    usual = [row for row in rows if row["num_rare"] >= 5]
    rare = [row for row in rows if row["num_rare"] < 5]
    worst = sorted(rows, key=lambda row: row["coverage"]["ours"])[:12]
    page = f"""# Intervals of pass@k: coverage in simulation

{{facts}}

How often the 95% interval holds the true value, in {NUM_EVALS} simulated evals per cell (standard
error of one cell: 0.010). Cells: {TASKS} tasks x 1, 4 and 16 rollouts, pass@1, pass@4, pass^4,
pass@16 and pass^16, chances of success 0.02 to 0.5 (and by symmetry to 0.98), tasks that are alike,
beta distributed with correlations of 0.1, 0.3 and 0.6, or of two kinds. Width: mean, over ours.

## At least 5 tasks differ from most: {len(usual)} cells

The number is tasks x min(truth, 1 - truth).

{table(head, summary(usual))}

## Fewer than 5 such tasks: {len(rare)} cells

Which of the rare tasks are in the set decides here; see docs/design/021-intervals.md.

{table(head, summary(rare))}

## The cells where ours holds the truth least often

{table(_HEAD, [_line(row) for row in worst])}
"""
    lines = [[*_HEAD, *(f"width {name}" for name in NAMES)]]
    lines += [[*_line(row), *(f"{row['width'][name]:.4f}" for name in NAMES)] for row in rows]
    write_results("intervals", page, facts, [", ".join(line) for line in lines])


def _line(row: dict[str, Any]) -> list[str]:
    name = f"pass{'^' if row['every'] else '@'}{row['k']}"
    setting = [str(row["tasks"]), str(row["rollouts"]), name, str(row["chance"]), row["population"]]
    return [*setting, f"{row['truth']:.3f}", *(f"{row['coverage'][one]:.3f}" for one in NAMES)]


if __name__ == "__main__":
    main()
