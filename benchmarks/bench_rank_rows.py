"""What handing the rows of a step to trainer ranks costs the driver, per token.

Two actors stand for ranks and only count what they get. "arguments" is a call with the batches
among its arguments, which pickles them in the event loop, once for each rank; "references" is what
`RayRanks` does. `loop` is processor time of the thread of the event loop, `all` of the process.
The goal is 0.1 us per token.

usage: bench_rank_rows.py [--tokens N] [--repeats N]
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import ray
from machine import facts_of_run, table, write_results

from telescope_train.batches.batch import PackedBatch, TrainingSample, TurnPart
from telescope_train.batches.packing import pack
from telescope_train.cluster.placement import Bundle
from telescope_train.cluster.ray_cluster import ray_cluster
from telescope_train.config.schema import RaySection
from telescope_train.trainer.ray_ranks import put_minibatches

Shards = Sequence[Sequence[Sequence[PackedBatch]]]
SAMPLE_TOKENS = 1024
NUM_RANKS = 2
HEAD = ("way", "tokens", "loop, us per token", "all, us per token")


class Sink:
    """Counts the tokens that it gets."""

    def take(self, minibatches: Sequence[Sequence[PackedBatch]]) -> int:
        """Return how many there are."""
        return sum(batch.num_tokens for batches in minibatches for batch in batches)


def step_of(num_tokens: int) -> Shards:
    """Return [rank][minibatch][batch] of a step of `num_tokens`."""
    generator = np.random.default_rng(0)
    samples = [
        TrainingSample(
            token_ids=generator.integers(30_000, size=SAMPLE_TOKENS, dtype=np.int32),
            mask=np.arange(SAMPLE_TOKENS) >= 100,
            behavior_logprobs=np.zeros(SAMPLE_TOKENS, np.float32),
            advantage=1.0,
            temperature=1.0,
            oldest_version=0,
            newest_version=0,
            group_id=f"group-{number // 8}",
            rollout_index=number % 8,
            environment="toy",
            turns=(TurnPart(0, SAMPLE_TOKENS - 100),),
        )
        for number in range(num_tokens // SAMPLE_TOKENS)
    ]
    ranks = pack(samples, np.ones(len(samples)), seq_len=8192, num_ranks=NUM_RANKS)
    return [[batches] for batches in ranks]


async def by_arguments(sinks: Sequence[Any], shards: Shards) -> int:
    """Give each rank its batches as an argument."""
    calls = [sink.take.remote(shard) for sink, shard in zip(sinks, shards, strict=True)]
    return sum(await asyncio.gather(*calls))


async def by_references(sinks: Sequence[Any], shards: Shards) -> int:
    """Give each rank a reference to its batches."""
    rows = await put_minibatches(shards)
    calls = [sink.take.remote(one) for sink, one in zip(sinks, rows, strict=True)]
    return sum(await asyncio.gather(*calls))


async def measure(
    name: str, way: Callable[[Sequence[Any], Shards], Awaitable[int]], shards: Shards, repeats: int
) -> list[str]:
    """Return one row: medians over `repeats` steps."""
    actor = ray.remote(Sink)
    sinks = [actor.remote() for _ in range(NUM_RANKS)]
    num_tokens = await way(sinks, shards)
    in_loop, in_all = [], []
    for _ in range(repeats):
        loop_s, all_s = time.thread_time(), time.process_time()
        await way(sinks, shards)
        in_loop.append((time.thread_time() - loop_s) * 1e6 / num_tokens)
        in_all.append((time.process_time() - all_s) * 1e6 / num_tokens)
    medians = (f"{statistics.median(times):.4f}" for times in (in_loop, in_all))
    return [name, f"{num_tokens:,}", *medians]


def main() -> None:
    """Measure both ways on a cluster of the benchmark's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2**21)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    shards = step_of(chosen.tokens)
    facts = facts_of_run("OMP_NUM_THREADS=1 python benchmarks/bench_rank_rows.py", "ray", "numpy")
    with ray_cluster(RaySection(), [Bundle(cpus=1.0)] * NUM_RANKS, debug=False):
        rows = [
            asyncio.run(measure(name, way, shards, chosen.repeats))
            for name, way in (("arguments", by_arguments), ("references", by_references))
        ]
    text = table(HEAD, rows)
    print(text)
    page = f"{__doc__.partition('usage:')[0].strip()}\n\n{{facts}}\n\n{text}"
    write_results("rank_rows", page, facts, [dict(zip(HEAD, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
