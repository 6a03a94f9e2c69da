"""Rows of a step in Ray's object store, from which each rank fetches its own.

The driver writes them once, in a thread beside its event loop, and hands out references. A rank on
the same machine reads them where they lie; one elsewhere has its node fetch them. So the number of
tokens in a step is no work for the event loop, and ranks that share rows share one copy.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from telescope_train.batches.batch import PackedBatch


async def put_rows(shards: Sequence[Sequence[PackedBatch]]) -> list[Any]:
    """Return a reference to the batches of each shard, [batch]."""
    return await asyncio.to_thread(lambda: [ray.put(without_origins(one)) for one in shards])


async def put_minibatches(shards: Sequence[Sequence[Sequence[PackedBatch]]]) -> list[Any]:
    """Return a reference to the batches of each shard, [minibatch][batch]."""
    return await asyncio.to_thread(
        lambda: [ray.put([without_origins(part) for part in shard]) for shard in shards]
    )


def without_origins(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Return `batches` without fields only for records, which hold Python objects per sample."""
    return [replace(batch, origins=()) for batch in batches]
