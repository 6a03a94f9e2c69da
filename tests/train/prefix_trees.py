"""Samples that begin alike in every way that a tree can, and batches that say so."""

from dataclasses import replace

import numpy as np

from telescope_train.batches.batch import PackedBatch, TrainingSample, TurnPart
from telescope_train.batches.packing import end_to_end
from telescope_train.batches.prefixes import prefix_order
from telescope_train.batches.weighting import token_weights

MAX_TOKENS = 64


def random_tree(
    generator: np.random.Generator, *, num: int, vocab: int, longest: int = 24
) -> list[TrainingSample]:
    """Return samples of which each begins like an earlier one, from one token on to all of it.

    Some are another one's beginning, some are the same, and some begin like none.
    """
    found: list[np.ndarray] = []
    for _ in range(num):
        begin = np.zeros(0, np.int32)
        if found and generator.random() < 0.85:
            other = found[int(generator.integers(len(found)))]
            begin = other[: int(generator.choice([1, len(other), generator.integers(1, longest)]))]
        room = max(2 - len(begin), int(generator.integers(0, longest)))
        added = generator.integers(vocab, size=room, dtype=np.int32)
        found.append(np.concatenate([begin, added])[: 3 * longest])
    return [tree_sample(generator, ids, number) for number, ids in enumerate(found)]


def tree_sample(
    generator: np.random.Generator, token_ids: np.ndarray, number: int
) -> TrainingSample:
    """Return a sample whose trained tokens, temperature and advantage are its own."""
    mask = generator.random(len(token_ids)) < generator.choice([0.3, 0.9])
    mask[0], mask[-1] = False, True
    logprobs = np.where(mask, -2.0 - generator.random(len(token_ids)), np.nan)
    return TrainingSample(
        token_ids=token_ids.astype(np.int32),
        mask=mask,
        behavior_logprobs=logprobs.astype(np.float32),
        advantage=float(generator.normal()),
        temperature=float(generator.choice([0.7, 1.0, 1.3])),
        oldest_version=0,
        newest_version=0,
        group_id=f"g{number // 4}",
        rollout_index=number % 4,
        environment="toy",
        turns=(TurnPart(0, int(mask.sum())),),
    )


def plain_batches(
    samples: list[TrainingSample], *, num_ranks: int = 1, num_batches: int = 1
) -> list[list[PackedBatch]]:
    """Return the batches of each rank, without anything shared; alike samples are neighbors."""
    weights_N = token_weights(samples, "token", max_tokens=MAX_TOKENS)
    order_N = prefix_order(samples, min_tokens=1).order_N
    parts = [
        end_to_end([samples[index] for index in part.tolist()], weights_N[part])
        for part in np.array_split(order_N, num_ranks * num_batches)
    ]
    return [parts[rank::num_ranks] for rank in range(num_ranks)]


def sharing_all(batch: PackedBatch, *, sometimes: np.random.Generator | None = None) -> PackedBatch:
    """Return `batch` with each token shared that a sample and the one before it begin with.

    With `sometimes`, fewer are: any number is right that they have in common.
    """
    shared, before = [], np.zeros(0, np.int32)
    for sample in range(len(batch.lengths_S)):
        ids = batch.token_ids_T[batch.sequence_ids_T == sample]
        common = 0
        while common < min(len(ids), len(before)) and ids[common] == before[common]:
            common += 1
        if sometimes is not None and sometimes.random() < 0.3:
            common = int(sometimes.integers(common + 1))
        shared.append(common)
        before = ids
    return replace(batch, shared_S=np.array(shared, np.int64))


def all_shared(shards: list[list[PackedBatch]]) -> list[list[PackedBatch]]:
    """Return `sharing_all` of every batch."""
    return [[sharing_all(batch) for batch in shard] for shard in shards]
