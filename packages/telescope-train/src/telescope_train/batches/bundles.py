"""Which samples with a common beginning go into one row: they are bound into bundles and planned.

A bundle is a run of neighbors in the order of their tokens, and it is planned like one sample.
Large bundles share the most and are hard to spread over ranks, so several sizes are tried and the
plan with the lowest cost wins; samples without bundles are one of the candidates.
Letters: N samples in the order of their tokens, G bundles.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.binning import Bin
from telescope_train.batches.even_costs import spread_by_costs, waiting_time
from telescope_train.batches.prefixes import (
    PrefixOrder,
    prefix_order,
    row_costs,
    shared_among,
)

_PARTS = (1, 2, 4, 8)
"""Bundles of at most `seq_len` over each of these are tried."""
_GOOD_ENOUGH = 1.01
"""Ranks that wait for less than this much of a step leave smaller bundles nothing to gain."""


def spread_bundles(
    samples: Sequence[TrainingSample],
    lengths_N: NDArray[np.int64],
    *,
    seq_len: int,
    num_ranks: int,
    hidden_size: int,
) -> tuple[list[list[Bin]], PrefixOrder]:
    """Return the bins of each rank, each in the order of tokens, and that order.

    A bin holds at most `seq_len` tokens, those that it shares counted once, and no more trained
    ones: the output head is computed for each of those.
    """
    found = prefix_order(samples)
    lengths_N = lengths_N[found.order_N]
    trained_N = np.array([np.count_nonzero(samples[i].mask) for i in found.order_N.tolist()])
    best, best_time = None, np.inf
    for firsts_G in _candidates(found.shared_N, lengths_N, trained_N, seq_len):
        shared_N = found.shared_N.copy()
        shared_N[firsts_G] = 0
        sizes_G = np.maximum(
            np.add.reduceat(lengths_N - shared_N, firsts_G), np.add.reduceat(trained_N, firsts_G)
        )
        costs_G = np.add.reduceat(row_costs(lengths_N, shared_N, hidden_size), firsts_G)
        ranks = spread_by_costs(sizes_G, costs_G, seq_len=seq_len, num_ranks=num_ranks)
        time = waiting_time(ranks, costs_G)
        if time < best_time:
            ends_G = np.append(firsts_G[1:], len(lengths_N))
            best, best_time = [[_members(b, firsts_G, ends_G) for b in r] for r in ranks], time
        if time <= _GOOD_ENOUGH * costs_G.sum() / num_ranks:
            break
    assert best is not None, "there is a candidate without bundles"
    return best, found


def bundle_sizes(
    samples: Sequence[TrainingSample], *, seq_len: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield (tokens of a row, indices of its samples) of each bundle of at most `seq_len`.

    No samples, as of groups whose rewards are all equal, give no bundles.
    """
    if not samples:
        return
    found = prefix_order(samples)
    lengths_N = np.array([len(samples[i]) for i in found.order_N.tolist()])
    trained_N = np.array([np.count_nonzero(samples[i].mask) for i in found.order_N.tolist()])
    firsts = _firsts(found.shared_N, lengths_N, trained_N, seq_len).tolist()
    for first, end in zip(firsts, [*firsts[1:], len(lengths_N)], strict=True):
        shared_N = found.shared_N[first:end].copy()
        shared_N[0] = 0
        num_tokens = int((lengths_N[first:end] - shared_N).sum())
        size = max(num_tokens, int(trained_N[first:end].sum()))
        yield size, found.order_N[first:end].tolist()


def shared_in_rows(rows: Sequence[Bin], shared_N: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return for each row what each of its samples shares with the one before it."""
    return [shared_among(shared_N, members) for members in rows]


def _candidates(
    shared_N: NDArray[np.int64],
    lengths_N: NDArray[np.int64],
    trained_N: NDArray[np.int64],
    seq_len: int,
) -> Iterator[NDArray[np.int64]]:
    """Yield the first samples of bundles, the largest bundles first and no bundles last."""
    if shared_N.any():
        for part in _PARTS:
            yield _firsts(shared_N, lengths_N, trained_N, seq_len // part)
    yield np.arange(len(shared_N))


def _firsts(
    shared_N: NDArray[np.int64],
    lengths_N: NDArray[np.int64],
    trained_N: NDArray[np.int64],
    capacity: int,
) -> NDArray[np.int64]:
    """Return the first sample of each bundle that is filled up to `capacity` tokens."""
    firsts: list[int] = []
    num_tokens = num_trained = 0
    rows = zip(shared_N.tolist(), lengths_N.tolist(), trained_N.tolist(), strict=True)
    for place, (shared, length, trained) in enumerate(rows):
        num_tokens += length - shared
        num_trained += trained
        if not place or not shared or max(num_tokens, num_trained) > capacity:
            firsts.append(place)
            num_tokens, num_trained = length, trained
    return np.array(firsts, np.int64)


def _members(bundles: Bin, firsts_G: NDArray[np.int64], ends_G: NDArray[np.int64]) -> Bin:
    """Return the places of all samples in `bundles`, ascending."""
    ranges = [np.arange(firsts_G[one], ends_G[one]) for one in np.sort(bundles).tolist()]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
