"""How long ranks wait for each other in a step, by the costs of their batches.

`before`: bins are filled best and dealt by cost. `after`: samples also change places inside each
round. `at least`: what no order of these bins can avoid, because one sample alone costs more than
the mean of its round. Run: python benchmarks/bench_even_costs.py
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
from machine import facts_of_run, table, write_results

from telescope_train.batches.binning import deal, sample_costs, spread_over_ranks
from telescope_train.batches.even_costs import spread_evenly, waiting_time

HIDDEN_SIZE, SEEDS = 2048, range(8)
HEAD = [
    *("lengths", "seq_len", "samples", "ranks", "waits before", "after", "at least"),
    *("plan before", "plan after"),
]
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


def measured(mix: str, seq_len: int, num_samples: int, num_ranks: int) -> list[str]:
    """Return one row: waits before and after, what cannot be avoided, and the time of plans."""
    waits: dict[str, list[float]] = {"before": [], "after": [], "at least": []}
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        lengths = MIXES[mix](rng, num_samples, seq_len).astype(np.int64).clip(16, seq_len)
        costs = sample_costs(lengths, HIDDEN_SIZE)
        options = {"num_ranks": num_ranks, "hidden_size": HIDDEN_SIZE}
        began_s = time.perf_counter()
        bins = spread_over_ranks(lengths, seq_len=seq_len, num_ranks=num_ranks)
        before = deal(bins, lengths, **options)
        seconds["before"].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        after = spread_evenly(lengths, seq_len=seq_len, **options)
        seconds["after"].append(time.perf_counter() - began_s)
        floor = sum(
            max(
                sum(costs[members].sum() for members in one) / num_ranks,
                max(costs[members].max(initial=0.0) for members in one),
            )
            for one in zip(*after, strict=True)
        )
        ideal = costs.sum() / num_ranks
        for name, total in (
            ("before", waiting_time(before, costs)),
            ("after", waiting_time(after, costs)),
            ("at least", floor),
        ):
            waits[name].append(1.0 - ideal / total)
    return [
        mix,
        f"{seq_len:,}",
        f"{num_samples:,}",
        f"{num_ranks}",
        *(f"{statistics.mean(waits[name]):.1%}" for name in waits),
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
    text = table(HEAD, rows)
    print(text)
    facts = facts_of_run(COMMAND, "numpy") | {"hidden_size": HIDDEN_SIZE, "seeds": list(SEEDS)}
    page = f"{__doc__.partition(' Run:')[0].strip()}\n\n{text}"
    write_results("even_costs", page, facts, [dict(zip(HEAD, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
