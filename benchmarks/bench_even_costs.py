"""How long ranks wait for each other in a step, by the costs of their batches.

`dealt`: bins are filled best and dealt by cost. `before`: samples also change places inside each
round, as was done before. `now`: they change places between all rounds. `at least`: what no plan
can avoid (`least_time`), as single samples cost more than the mean and long ones leave no room.

Of samples of middling lengths (lower and upper end, as shares of a bin), `before` are the bins of
the better of two plans, `now` of three, and `at least` those that no plan can do without: so many
bins can hold the most samples that fit, and all others hold one fewer.
Run: python benchmarks/bench_even_costs.py
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from machine import facts_of_run, table, write_results

from telescope_train.batches.binning import (
    Bin,
    deal_by_costs,
    plan_bins,
    sample_costs,
    spread_over_ranks,
)
from telescope_train.batches.even_costs import draft_by_costs, spread_by_costs
from telescope_train.batches.least_time import least_time, waiting_time
from telescope_train.batches.tight_bins import plan_grouped_bins, plan_tight_bins

HIDDEN_SIZE, SEEDS, CAPACITY = 2048, range(8), 32_768
HEAD = [
    *("lengths", "seq_len", "samples", "ranks", "waits dealt", "before", "now", "at least"),
    *("plan dealt", "plan before", "plan now"),
]
HEAD_OF_BINS = ["lengths", "samples", "bins before", "now", "at least", "plan before", "plan now"]
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_even_costs.py"


def _lognormal(rng: np.random.Generator, median: float, sigma: float, size: int) -> np.ndarray:
    return median * np.exp(sigma * rng.standard_normal(size))


MIXES: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "lognormal": lambda rng, n, most: _lognormal(rng, 0.12 * most, 0.8, n),
    "two kinds": lambda rng, n, most: np.where(
        rng.random(n) < 0.7,
        _lognormal(rng, 0.04 * most, 0.5, n),
        _lognormal(rng, 0.45 * most, 0.5, n),
    ),
    "alike": lambda rng, n, most: rng.uniform(0.3 * most, 0.6 * most, n),
}


def dealt(
    lengths: np.ndarray, costs: np.ndarray, *, seq_len: int, num_ranks: int
) -> list[list[Bin]]:
    """Return the bins that are filled best, dealt by cost."""
    bins = spread_over_ranks(lengths, seq_len=seq_len, num_ranks=num_ranks)
    return deal_by_costs(bins, costs, num_ranks=num_ranks)


def measured(mix: str, seq_len: int, num_samples: int, num_ranks: int) -> list[str]:
    """Return one row: waits before and after, what cannot be avoided, and the time of plans."""
    waits: dict[str, list[float]] = {"dealt": [], "before": [], "now": [], "at least": []}
    seconds: dict[str, list[float]] = {"dealt": [], "before": [], "now": []}
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        lengths = MIXES[mix](rng, num_samples, seq_len).astype(np.int64).clip(16, seq_len)
        costs = sample_costs(lengths, HIDDEN_SIZE)
        limits = {"seq_len": seq_len, "num_ranks": num_ranks}
        plans: dict[str, Callable[[], list[list[Bin]]]] = {
            "dealt": partial(dealt, lengths, costs, **limits),
            "before": partial(draft_by_costs, lengths, costs, **limits),
            "now": partial(spread_by_costs, lengths, costs, **limits),
        }
        ideal = costs.sum() / num_ranks
        for name, plan in plans.items():
            began_s = time.perf_counter()
            found = plan()
            seconds[name].append(time.perf_counter() - began_s)
            waits[name].append(1.0 - ideal / waiting_time(found, costs))
        waits["at least"].append(1.0 - ideal / least_time(lengths, costs, **limits))
    return [
        mix,
        f"{seq_len:,}",
        f"{num_samples:,}",
        f"{num_ranks}",
        *(f"{statistics.mean(waits[name]):.1%}" for name in waits),
        *(f"{1000 * statistics.median(seconds[name]):.0f} ms" for name in seconds),
    ]


def fewest(lengths: np.ndarray, capacity: int) -> int:
    """Return a number of bins that no plan is below."""
    totals = np.cumsum(np.sort(lengths))
    most = int(np.searchsorted(totals, capacity, side="right"))
    numbers = np.arange(1, len(lengths) // most + 1)
    full = int(np.count_nonzero(totals[most * numbers - 1] <= numbers * capacity))
    rest = full if most == 1 else -(-(len(lengths) - most * full) // (most - 1))
    return max(-(-int(totals[-1]) // capacity), full + rest)


def bins_of(low: float, high: float, num_samples: int) -> list[str]:
    """Return one row: bins before and now, the fewest, and the time of plans."""
    bins: dict[str, list[int]] = {"before": [], "now": [], "at least": []}
    seconds: dict[str, list[float]] = {"before": [], "now": []}
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        drawn = rng.uniform(low * CAPACITY, high * CAPACITY, num_samples).astype(np.int64)
        lengths, counts = (column.tolist() for column in np.unique(drawn, return_counts=True))
        first, *others = (
            partial(one, lengths, counts, capacity=CAPACITY)
            for one in (plan_bins, plan_tight_bins, plan_grouped_bins)
        )
        for name, plans in (("before", [first, others[0]]), ("now", [first, *others])):
            began_s = time.perf_counter()
            found = [plan() or [] for plan in plans]
            seconds[name].append(time.perf_counter() - began_s)
            bins[name].append(min(sum(p.num_bins for p in plan) for plan in found if plan))
        bins["at least"].append(fewest(drawn, CAPACITY))
    return [
        f"{low:g} to {high:g}",
        f"{num_samples:,}",
        *(f"{statistics.mean(bins[name]):.1f}" for name in bins),
        *(f"{1000 * statistics.median(seconds[name]):.0f} ms" for name in seconds),
    ]


def main() -> None:
    """Measure, print and write the results."""
    rows = [
        measured(mix, seq_len, num_samples, num_ranks)
        for mix in MIXES
        for seq_len in (4096, 32_768)
        for num_samples, num_ranks in ((256, 8), (4096, 16))
    ]
    bins = [
        bins_of(low, high, num_samples)
        for low, high in ((0.3, 0.6), (0.25, 0.5), (0.3, 0.45), (0.2, 0.5), (0.2, 0.35))
        for num_samples in (256, 2048)
    ]
    text = f"{table(HEAD, rows)}\n\n{table(HEAD_OF_BINS, bins)}"
    print(text)
    facts = facts_of_run(COMMAND, "numpy") | {"hidden_size": HIDDEN_SIZE, "seeds": list(SEEDS)}
    page = f"{__doc__.partition('Run:')[0].strip()}\n\n{{facts}}\n\n{text}"
    found = [dict(zip(HEAD, row, strict=True)) for row in rows]
    found += [dict(zip(HEAD_OF_BINS, row, strict=True)) for row in bins]
    write_results("even_costs", page, facts, found)


if __name__ == "__main__":
    main()
