"""Packing against a plain Python first-fit decreasing: same samples, same process, taking turns.

`plan` is lengths to bins; `pack` is samples to the arrays of every batch. The peer keeps its
samples as Python lists, as such packers do, and is not charged for making them.
Run: python benchmarks/bench_packing.py
"""

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np

from telescope_train.batch import TrainingSample
from telescope_train.binning import best_fit
from telescope_train.packing import pack
from telescope_train.weighting import token_weights

SEQ_LEN, NUM_PROMPT, SEEDS, REPEATS = 4096, 100, (0, 1, 2), 3
PACK_SIZES, PLAN_SIZES = (512, 2048), (512, 2048, 8192)
RESULTS = Path(__file__).parent / "results"
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
        row = take_turns(lambda: best_fit(lengths, SEQ_LEN), lambda: plain_plan(plain_lengths))
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


def measure_all() -> list[dict[str, object]]:
    """Return one row per mix and size: the median over seeds."""
    rows: list[dict[str, object]] = []
    for what, sizes in (("pack", PACK_SIZES), ("plan", PLAN_SIZES)):
        for mix in MIXES:
            for size in sizes:
                runs = [measure(what, mix, size, seed) for seed in SEEDS]
                medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                rows.append({"what": what, "mix": mix, "num_samples": size, **medians})
                print(as_line(rows[-1]), flush=True)
    return rows


def as_line(row: dict) -> str:
    """Return one line of the table."""
    return (
        f"| {row['what']} | {row['mix']} | {row['num_samples']} | {row['ours_ms']:.1f} "
        f"| {row['peer_ms']:.1f} | {row['ratio']:.1f}x | {row['ours_fill']:.4f} "
        f"| {row['peer_fill']:.4f} | {row['best_possible_fill']:.4f} |"
    )


def processor() -> str:
    """Return the name of the processor, where the system says it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def main() -> None:
    """Measure, print and write the results."""
    rows = measure_all()
    facts = {
        "command": COMMAND,
        "date": date.today().isoformat(),
        "machine": processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "seq_len": SEQ_LEN,
        "seeds": list(SEEDS),
        "repeats": REPEATS,
    }
    head = "| what | lengths | samples | ours, ms | peer, ms | ratio | fill | peer's | best |"
    table = "\n".join([head, "|---" * 9 + "|", *map(as_line, rows)])
    about = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    note = (
        "Peer: first-fit decreasing in plain Python, in this script. `pack` is the whole job, from"
        " samples to arrays; `plan` is the choice of bins alone, where ours looks for better bins"
        " when the first ones leave room. CPU time of one thread, both sides taking turns in one"
        " process; medians over seeds of medians over repeats. `best` is the fill of the fewest"
        " bins that could hold the tokens, whatever their lengths."
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "packing.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    (RESULTS / "packing.md").write_text(f"# Packing\n\n{note}\n\n{about}\n\n{table}\n")


if __name__ == "__main__":
    main()
