"""Packing against a plain Python first-fit decreasing: same samples, same process, taking turns.

`plan` is lengths to bins; `pack` is samples to the arrays of every batch. The peer keeps its
samples as Python lists, as such packers do, and is not charged for making them. Over ranks, the
peer balances its bins by FLOPs with Karmarkar and Karp's differencing.
Run: python benchmarks/bench_packing.py
"""

import heapq
import statistics
import time
from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from machine import facts_of_run, table, write_results

from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.binning import deal, sample_costs, spread_over_ranks
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights

SEQ_LEN, NUM_PROMPT, SEEDS, REPEATS = 4096, 100, (0, 1, 2), 3
PACK_SIZES, PLAN_SIZES = (512, 2048), (512, 2048, 8192)
MANY, NUM_RANKS, HIDDEN_SIZE = 32_768, 16, 1024
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_packing.py"


def _lognormal(rng: np.random.Generator, median: float, sigma: float, size: int) -> np.ndarray:
    return (median * np.exp(sigma * rng.standard_normal(size))).astype(np.int64)


MIXES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "one environment: lognormal, median 600": lambda rng, n: _lognormal(rng, 600, 0.8, n),
    "two environments: 70 % around 180, 30 % around 1800": lambda rng, n: np.where(
        rng.random(n) < 0.7, _lognormal(rng, 180, 0.5, n), _lognormal(rng, 1800, 0.5, n)
    ),
    "many cut at 2048, prompts of 50 to 400": lambda rng, n: (
        _lognormal(rng, 1200, 0.7, n).clip(max=2048) + rng.integers(50, 400, n)
    ),
}


class PlainSample(NamedTuple):
    """What the peer packs: one sample in Python lists."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantage: float
    temperature: float
    version: int
    weight: float


def plain_plan(lengths: list[int]) -> list[list[int]]:
    """First-fit decreasing over samples and bins."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[sample]
        for place, room in enumerate(rooms):
            if length <= room:
                bins[place].append(sample)
                rooms[place] -= length
                break
        else:
            bins.append([sample])
            rooms.append(SEQ_LEN - length)
    return bins


def plain_pack(samples: list[PlainSample]) -> list[dict[str, np.ndarray]]:
    """Plan, then extend one list per field and turn each into an array."""
    batches: list[dict[str, np.ndarray]] = []
    for members in plain_plan([len(sample.token_ids) for sample in samples]):
        columns: list[list] = [[] for _ in range(9)]
        ids, positions, sequences, mask, logprobs, advantages, weights, temps, versions = columns
        for number, sample in enumerate(samples[member] for member in members):
            length = len(sample.token_ids)
            ids.extend(sample.token_ids)
            positions.extend(range(length))
            sequences.extend([number] * length)
            mask.extend(sample.mask)
            logprobs.extend(sample.logprobs)
            advantages.extend([sample.advantage] * length)
            weights.extend([sample.weight if trained else 0.0 for trained in sample.mask])
            temps.extend([sample.temperature] * length)
            versions.extend([sample.version] * length)
        batches.append(
            {
                "token_ids": np.array(ids, np.int32),
                "positions": np.array(positions, np.int32),
                "sequence_ids": np.array(sequences, np.int32),
                "mask": np.array(mask, np.bool_),
                "logprobs": np.array(logprobs, np.float32),
                "advantages": np.array(advantages, np.float32),
                "weights": np.array(weights, np.float32),
                "temperatures": np.array(temps, np.float32),
                "versions": np.array(versions, np.int32),
            }
        )
    return batches


def plain_spread(lengths: list[int]) -> list[list[list[int]]]:
    """Plan bins, then give them to ranks so that their FLOPs are equal: differencing.

    A state is (minus its spread, number, one (FLOPs, bins) per rank in ascending order); the two
    with the largest spread become one, the richest rank of either with the poorest of the other.
    """
    bins = plain_plan(lengths)
    states = []
    for number, members in enumerate(bins):
        cost = sum(n + n * n / (12.0 * HIDDEN_SIZE) for n in (lengths[i] for i in members))
        states.append((-cost, number, [(0.0, [])] * (NUM_RANKS - 1) + [(cost, [number])]))
    heapq.heapify(states)
    for number in range(len(bins), 2 * len(bins) - 1):
        one, other = heapq.heappop(states)[2], heapq.heappop(states)[2]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda rank: rank[0])
        heapq.heappush(states, (merged[0][0] - merged[-1][0], number, merged))
    return [[bins[number] for number in numbers] for _, numbers in states[0][2]]


def make_samples(lengths: np.ndarray, rng: np.random.Generator) -> list[TrainingSample]:
    """Make samples of given lengths: a prompt, then tokens of the policy."""
    samples = []
    for number, length in enumerate(lengths.tolist()):
        mask = np.arange(length) >= min(NUM_PROMPT, length - 1)
        logprobs = np.where(mask, -rng.random(length), np.nan).astype(np.float32)
        samples.append(
            TrainingSample(
                token_ids=rng.integers(0, 150_000, length).astype(np.int32),
                mask=mask,
                behavior_logprobs=logprobs,
                advantage=float(rng.standard_normal()),
                temperature=1.0,
                oldest_version=3,
                newest_version=3,
                group_id=str(number // 8),
                rollout_index=number % 8,
                environment="bench",
            )
        )
    return samples


def as_plain(samples: list[TrainingSample], weights_N: np.ndarray) -> list[PlainSample]:
    """Return the same samples in Python lists."""
    return [
        PlainSample(
            sample.token_ids.tolist(),
            sample.mask.tolist(),
            np.nan_to_num(sample.behavior_logprobs).tolist(),
            sample.advantage,
            sample.temperature,
            sample.oldest_version,
            weight,
        )
        for sample, weight in zip(samples, weights_N.tolist(), strict=True)
    ]


def take_turns(ours: Callable[[], list], peer: Callable[[], list]) -> dict[str, float]:
    """Take the CPU time of both `REPEATS` times, alternating, after one untimed call each."""
    results = {"ours": ours(), "peer": peer()}
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(REPEATS):
        for name, call in (("ours", ours), ("peer", peer)):
            started = time.process_time()
            call()
            seconds[name].append(time.process_time() - started)
    ours_s, peer_s = (statistics.median(seconds[name]) for name in ("ours", "peer"))
    return {
        "ours_ms": 1e3 * ours_s,
        "peer_ms": 1e3 * peer_s,
        "ratio": peer_s / ours_s,
        "ours_bins": len(results["ours"]),
        "peer_bins": len(results["peer"]),
    }


def measure(what: str, mix: str, size: int, seed: int) -> dict[str, float]:
    """Return one measurement, with the fill that each side reached."""
    rng = np.random.default_rng([seed, size])
    lengths = MIXES[mix](rng, size).clip(16, SEQ_LEN)
    if what == "plan":
        plain_lengths = lengths.tolist()
        row = take_turns(
            lambda: spread_over_ranks(lengths, seq_len=SEQ_LEN, num_ranks=1),
            lambda: plain_plan(plain_lengths),
        )
    else:
        samples = make_samples(lengths, rng)
        weights_N = token_weights(samples, "token", max_tokens=SEQ_LEN)
        plain = as_plain(samples, weights_N)
        row = take_turns(
            lambda: pack(samples, weights_N, seq_len=SEQ_LEN, num_ranks=1)[0],
            lambda: plain_pack(plain),
        )
    num_tokens = int(lengths.sum())
    row["ours_mtokens_per_s"] = num_tokens / row["ours_ms"] / 1e3
    row["ours_fill"] = num_tokens / (row["ours_bins"] * SEQ_LEN)
    row["peer_fill"] = num_tokens / (row["peer_bins"] * SEQ_LEN)
    row["best_possible_fill"] = num_tokens / (-(-num_tokens // SEQ_LEN) * SEQ_LEN)
    return row


def measure_ranks(mix: str, seed: int) -> dict[str, float]:
    """Return one measurement of a large step over many ranks; the peer, slow at this, runs once."""
    rng = np.random.default_rng([seed, MANY])
    lengths = MIXES[mix](rng, MANY).clip(16, SEQ_LEN)
    plain_lengths = lengths.tolist()

    def ours() -> list[list[np.ndarray]]:
        bins = spread_over_ranks(lengths, seq_len=SEQ_LEN, num_ranks=NUM_RANKS)
        return deal(bins, lengths, num_ranks=NUM_RANKS, hidden_size=HIDDEN_SIZE)

    times, plans = [], []
    for call in (ours, ours, ours, ours, lambda: plain_spread(plain_lengths)):
        started = time.process_time()
        plans.append(call())
        times.append(1e3 * (time.process_time() - started))
    samples = make_samples(lengths, rng)
    weights_N = token_weights(samples, "token", max_tokens=SEQ_LEN)
    pack_times = []
    for _ in range(1 + REPEATS):
        started = time.process_time()
        pack(samples, weights_N, seq_len=SEQ_LEN, num_ranks=NUM_RANKS, hidden_size=HIDDEN_SIZE)
        pack_times.append(1e3 * (time.process_time() - started))
    row = {
        "ours_ms": statistics.median(times[1:4]),
        "peer_ms": times[4],
        "ratio": times[4] / statistics.median(times[1:4]),
        "pack_ms": statistics.median(pack_times[1:]),
        "mtokens": lengths.sum() / 1e6,
    }
    for side, ranks in zip(("ours", "peer"), plans[-2:], strict=True):
        row |= {f"{side}_{key}": value for key, value in quality(ranks, lengths).items()}
    places = -(-int(lengths.sum()) // (SEQ_LEN * NUM_RANKS)) * NUM_RANKS
    row["best_possible_fill"] = lengths.sum() / (places * SEQ_LEN)
    return row


def quality(ranks: list, lengths: np.ndarray) -> dict[str, float]:
    """Return fill and balance of a plan: every rank runs as many batches as the one with most."""
    costs_N = sample_costs(lengths, HIDDEN_SIZE)
    costs = [
        sorted((costs_N[np.array(b, int)].sum() for b in rank), reverse=True) for rank in ranks
    ]
    totals = np.array([sum(rank) for rank in costs])
    slowest = sum(max(batches) for batches in zip_longest(*costs, fillvalue=0.0))
    return {
        "fill": lengths.sum() / (max(map(len, ranks)) * NUM_RANKS * SEQ_LEN),
        "imbalance": totals.max() / totals.mean(),
        "with_waiting": slowest / totals.mean(),
    }


def measure_all() -> tuple[list[dict], list[dict]]:
    """Return one row per mix and size, and one per mix over ranks: the medians over seeds."""
    rows: list[dict] = []
    for what, sizes in (("pack", PACK_SIZES), ("plan", PLAN_SIZES)):
        for mix in MIXES:
            for size in sizes:
                runs = [measure(what, mix, size, seed) for seed in SEEDS]
                rows.append({"what": what, "mix": mix, "num_samples": size, **medians(runs)})
                print(" | ".join(as_cells(rows[-1])), flush=True)
    over_ranks: list[dict] = []
    for mix in MIXES:
        runs = [measure_ranks(mix, seed) for seed in SEEDS[:1]]
        over_ranks.append({"what": "ranks", "mix": mix, "num_samples": MANY, **medians(runs)})
        print(" | ".join(as_rank_cells(over_ranks[-1])), flush=True)
    return rows, over_ranks


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(statistics.median(run[key] for run in runs)) for key in runs[0]}


HEAD = ("what", "lengths", "samples", "ours, ms", "peer, ms", "ratio", "fill", "peer's", "best")


def as_cells(row: dict) -> list[str]:
    """Return one line of the first table."""
    return [
        *(row["what"], row["mix"], str(row["num_samples"])),
        *(f"{row['ours_ms']:.1f}", f"{row['peer_ms']:.1f}", f"{row['ratio']:.1f}x"),
        *(f"{row[key]:.4f}" for key in ("ours_fill", "peer_fill", "best_possible_fill")),
    ]


RANKS_HEAD = (
    *("lengths", "ours, ms", "peer, ms", "ratio", "fill", "peer's", "best"),
    *("imbalance", "peer's", "with waiting", "peer's", "whole pack, ms", "Mtok/s"),
)


def as_rank_cells(row: dict) -> list[str]:
    """Return one line of the table over ranks."""
    keys = ("ours_fill", "peer_fill", "best_possible_fill", "ours_imbalance", "peer_imbalance")
    return [
        *(row["mix"], f"{row['ours_ms']:.1f}", f"{row['peer_ms']:.0f}", f"{row['ratio']:.0f}x"),
        *(f"{row[key]:.4f}" for key in (*keys, "ours_with_waiting", "peer_with_waiting")),
        *(f"{row['pack_ms']:.0f}", f"{1e3 * row['mtokens'] / row['pack_ms']:.0f}"),
    ]


NOTE = """\
# Packing

Peer: first-fit decreasing in plain Python, in this script. `pack` is the whole job, from samples
to arrays; `plan` is the choice of bins alone, where ours looks for better bins when the first ones
leave room. CPU time of one thread, both sides taking turns in one process; medians over seeds of
medians over repeats. `best` is the fill of the fewest bins that could hold the tokens, whatever
their lengths.

{facts}
"""
RANKS_NOTE = f"""
## {MANY:,} samples over {NUM_RANKS} ranks

The plan alone, from lengths to the batches of each rank in order. The peer is the same first-fit
decreasing, its bins then given to ranks by Karmarkar and Karp's differencing on their FLOPs,
attention included (hidden size {HIDDEN_SIZE}). `fill` counts the batches of all ranks, each rank
running as many as the one with most; `best` is that of the fewest equal rounds. `imbalance` is the
FLOPs of the busiest rank over the mean. Ranks wait for each other after every batch: `with waiting`
is the sum of the slowest batch of each round over the mean, the peer's batches running in order of
cost too. `whole pack` is ours with the arrays of all batches written: memory decides it.
"""


def main() -> None:
    """Measure, print and write the results."""
    facts = facts_of_run(COMMAND, "numpy")
    facts |= {"seq_len": SEQ_LEN, "seeds": list(SEEDS), "repeats": REPEATS}
    rows, over_ranks = measure_all()
    page = [
        NOTE,
        table(HEAD, [as_cells(row) for row in rows]),
        RANKS_NOTE,
        table(RANKS_HEAD, [as_rank_cells(row) for row in over_ranks]),
    ]
    write_results("packing", "\n".join(page), facts, [*rows, *over_ranks])


if __name__ == "__main__":
    main()
